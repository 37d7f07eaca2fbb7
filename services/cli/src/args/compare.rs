//! Arguments of `flotilla compare`.

use std::path::PathBuf;

use clap::Args;

/// Arguments of `flotilla compare`.
#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// Checkpoint: RUN (its best), RUN/newest or RUN/CYCLE; cycle 0 is the base
    #[arg(required_unless_present = "pairs", requires = "b")]
    pub a: Option<String>,
    /// Checkpoint to compare it with
    pub b: Option<String>,
    /// Compare paired scores instead of checkpoints: one {"a": 0.5, "b": 1} object per line, with
    /// scores from 0 to 1; "-" reads stdin
    #[arg(long, value_name = "FILE.jsonl", conflicts_with_all = ["a", "suite"])]
    pub pairs: Option<PathBuf>,
    /// Let a judge, the program or model in this file, choose the better one of two answers. A
    /// program runs on this machine, as your user
    #[arg(long, value_name = "FILE.yaml", conflicts_with = "pairs")]
    pub judge: Option<PathBuf>,
    /// Prompt suite to compare on [default: the runs' held-out prompts]
    #[arg(long)]
    pub suite: Option<String>,
    /// Highest probability of a wrong decision
    #[arg(long, value_name = "PROBABILITY", default_value_t = control::DEFAULT_ALPHA)]
    pub alpha: f64,
}
