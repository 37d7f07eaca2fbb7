//! Arguments of `flotilla court`.

use clap::Args;
use control::SEEDS_MAX;

/// Arguments of `flotilla court`.
#[derive(Debug, Args)]
pub(crate) struct CourtArgs {
    /// Run whose samples the objectives train on
    pub run: String,
    /// Cycle whose samples the objectives train on [default: the newest that has selected]
    #[arg(long)]
    pub cycle: Option<u32>,
    /// Objectives to compare, such as raft,dr_grpo,dpo; `flotilla objective list` shows all
    #[arg(long, value_delimiter = ',', required = true)]
    pub objectives: Vec<String>,
    /// Change a setting of an objective; may be repeated
    #[arg(long, value_name = "OBJECTIVE.KEY=VALUE")]
    pub set: Vec<String>,
    /// Trainings of each objective, with different seeds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=i64::from(SEEDS_MAX)))]
    pub seeds: u32,
}
