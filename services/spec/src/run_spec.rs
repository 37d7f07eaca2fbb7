//! The run spec as a user writes it. All defaults are defined here and in the modules of the
//! sections.

use serde::Deserialize;

use crate::{
    base::BaseSpec,
    chat::ChatSpec,
    eval_suite::{MeasuredSuites, SuiteSpec},
    raft::RaftSpec,
    training::{LoraAdapterSpec, TrainingSpec},
};

/// A run spec file.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSpec {
    /// Ids of runs are `<name>-<number>`.
    #[serde(default = "default_name")]
    pub name: String,
    /// All random choices of the run are derived from it.
    #[serde(default)]
    pub seed: u64,
    /// Pool whose agents may work on the run.
    #[serde(default = "default_pool")]
    pub pool: String,
    pub base: BaseSpec,
    /// Measured at every checkpoint.
    #[serde(default)]
    pub evals: Vec<SuiteSpec>,
    /// Supervised fine-tuning. Exactly one of `sft` and `raft` is set.
    pub sft: Option<SftSpec>,
    pub raft: Option<RaftSpec>,
}

/// A watch spec file: the settings of a run that adopts an external training.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WatchSpec {
    /// Ids of runs are `<name>-<number>`. Default: the directory's name.
    pub name: Option<String>,
    /// Model that the adapters belong to. Default: the one that they name.
    pub base: Option<BaseSpec>,
    /// Measured at every checkpoint.
    #[serde(default)]
    pub evals: Vec<SuiteSpec>,
    /// Last step of the training. Default: the step at which the training plans to end.
    pub until: Option<u32>,
}

/// The settings of supervised fine-tuning.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SftSpec {
    /// A file of examples.
    pub data: String,
    /// If enabled, plain prompts become user messages, and their completions become the answers.
    #[serde(default)]
    pub chat: ChatSpec,
    #[serde(default)]
    pub training: TrainingSpec,
    /// Absent: all weights are trained.
    pub lora: Option<LoraAdapterSpec>,
}

impl RunSpec {
    /// Returns the names of the suites in `evals`, texts and prompts apart, and whether the run has
    /// held-out prompts of its own.
    pub fn measured_suites(&self) -> MeasuredSuites<'_> {
        let names = |prompts: bool| {
            let of = self.evals.iter().filter(move |eval| eval.prompts.is_some() == prompts);
            of.map(|eval| eval.name.as_str()).collect()
        };
        let heldout = self.raft.as_ref().is_some_and(|raft| raft.heldout.is_some());
        MeasuredSuites { texts: names(false), prompt_suites: names(true), has_heldout: heldout }
    }
}

fn default_name() -> String {
    "run".to_owned()
}
fn default_pool() -> String {
    "default".to_owned()
}
