//! Another selection from samples that were kept.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct SelectArgs {
    #[arg(long)]
    pub run: String,
    #[arg(long)]
    pub cycle: u32,
    /// raft, rest_em, reinforce_rej or top_percent, or settings as in a spec's raft.selection:
    /// '{policy: rest_em, keep_per_prompt: 4}'.
    #[arg(long, value_name = "POLICY", default_value = "raft")]
    pub policy: String,
    /// Write what would be kept to a file of {"prompt", "completion"} lines.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}
