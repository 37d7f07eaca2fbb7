//! Arguments of `flotilla objective`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// A subcommand of `flotilla objective`.
#[derive(Debug, Subcommand)]
pub(crate) enum ObjectiveCommand {
    /// List the training objectives with their settings and what they need of samples
    List,
    /// Compute the weight of each token of scored sequences
    Weights(WeightsArgs),
}

/// Arguments of `flotilla objective weights`.
#[derive(Debug, Args)]
pub(crate) struct WeightsArgs {
    /// Objective, such as grpo; `flotilla objective list` shows all
    #[arg(long, value_name = "NAME")]
    pub objective: String,
    /// Change a setting of the objective; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Scored sequences, one {"prompt_id", "reward", "logprobs", "behaviour", "reference"} object
    /// per line, with a natural logarithm for each token; "-" reads stdin
    #[arg(long = "in", value_name = "FILE.jsonl")]
    pub input: PathBuf,
}
