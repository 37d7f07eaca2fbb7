//! Arguments of `flotilla compare`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

/// Arguments of `flotilla compare`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("scores").args(["verifier", "judge"]).multiple(true)))]
pub(crate) struct CompareArgs {
    /// Checkpoint: RUN (its best), RUN/newest or RUN/CYCLE; cycle 0 of a RAFT run is its base
    #[arg(required_unless_present = "pairs")]
    pub a: Option<String>,
    /// Checkpoint to compare it with [default with --prompts: the base of A's run, compared with A]
    #[arg(required_unless_present_any = ["pairs", "prompts"])]
    pub b: Option<String>,
    /// Compare paired scores instead of checkpoints: one {"a": 0.5, "b": 1} object per line, with
    /// scores from 0 to 1; "-" reads stdin
    #[arg(long, value_name = "FILE.jsonl", conflicts_with_all = ["a", "suite"])]
    pub pairs: Option<PathBuf>,
    /// Draw samples of these prompts with any two models: a file, or hub:ORG/NAME[:SPLIT]
    #[arg(long, value_name = "FILE", requires = "scores", conflicts_with_all = ["pairs", "suite"])]
    pub prompts: Option<String>,
    /// Verifier of these samples: a built-in one, or YAML such as 'numeric: {tolerance: 0.01}'
    #[arg(long, requires = "prompts")]
    pub verifier: Option<String>,
    /// Keys of `raft` for these samples, such as 'chat: true, sampling: {temperature: 0}'
    #[arg(long, value_name = "YAML", requires = "prompts")]
    pub settings: Option<String>,
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
