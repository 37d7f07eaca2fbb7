//! Arguments of `flotilla select`.

use std::path::PathBuf;

use clap::Args;

/// Arguments of `flotilla select`.
#[derive(Debug, Args)]
pub(crate) struct SelectArgs {
    /// Run whose samples to select from
    #[arg(long)]
    pub run: String,
    /// Cycle whose samples to select from
    #[arg(long)]
    pub cycle: u32,
    /// Selection strategy: raft, rest_em, reinforce_rej, top_percent, or settings as in a spec's
    /// raft.selection, such as '{policy: rest_em, keep_per_prompt: 4}'
    #[arg(long, value_name = "POLICY", default_value = "raft")]
    pub policy: String,
    /// Write the samples that would be kept to a file of {"prompt", "completion"} lines
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}
