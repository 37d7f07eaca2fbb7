//! The run spec as a user writes it. All defaults are defined here and in the modules of the
//! sections.

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    base::BaseSpec,
    chat::ChatSpec,
    data_source::{FEEDBACK_PREFIX, HUB_PREFIX, columns_schema},
    error::FieldError,
    eval_suite::{MeasuredSuites, SuiteSpec},
    promote::PromoteSpec,
    queue::QueueSpec,
    raft::RaftSpec,
    training::{LoraAdapterSpec, TrainingSpec},
};

/// The `sweep` section: lists of values by key, which is a path such as
/// `raft.training.learning_rate`, or a name that the spec writes once.
pub type SweepSpec = BTreeMap<String, Vec<Value>>;

/// A run of Flotilla: a model, data, and the settings of its training and evaluation. Exactly one of
/// `sft` and `raft` is set. File names are relative to the spec.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(
    title = "Run spec",
    extend("oneOf" = [{ "required": ["sft"] }, { "required": ["raft"] }])
)]
pub struct RunSpec {
    /// Name of the run. Ids of runs are `<name>-<number>`.
    #[schemars(regex(pattern = "^[a-z0-9][a-z0-9_-]{0,47}$"), example = &"mine")]
    #[serde(default = "default_name")]
    pub name: String,
    /// Number from which all random choices of the run are derived.
    #[serde(default)]
    pub seed: u64,
    /// Pool whose agents may work on the run.
    #[schemars(regex(pattern = "^[a-z0-9][a-z0-9_-]{0,63}$"))]
    #[serde(default = "default_pool")]
    pub pool: String,
    /// The model that training starts from.
    pub base: BaseSpec,
    /// Texts and prompts that are measured at every checkpoint.
    #[schemars(length(max = 64))]
    #[serde(default)]
    pub evals: Vec<SuiteSpec>,
    /// Supervised fine-tuning.
    pub sft: Option<SftSpec>,
    /// Reward-ranked fine-tuning.
    pub raft: Option<RaftSpec>,
    /// The channel that moves to the run's best checkpoint. Absent: the run moves no channel. Needs
    /// `raft.heldout`.
    pub promote: Option<PromoteSpec>,
    /// The place of the run in the queue of its pool. Absent: the run starts at once.
    pub queue: Option<QueueSpec>,
    /// Lists of values by key: the spec describes a run for each combination, at most 64. A key is a
    /// path such as `raft.training.learning_rate`, or a name that the spec writes once.
    #[schemars(schema_with = "sweep_schema", example = example_sweep())]
    #[serde(default)]
    pub sweep: Option<SweepSpec>,
}

/// A watch spec file: the settings of a run that adopts an external training. File names are
/// relative to the spec.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Watch spec")]
pub struct WatchSpec {
    /// Ids of runs are `<name>-<number>`. Default: the directory's name.
    #[schemars(regex(pattern = "^[a-z0-9][a-z0-9_-]{0,47}$"), example = &"support-bot")]
    pub name: Option<String>,
    /// Model that the adapters belong to. Default: the one that they name.
    pub base: Option<BaseSpec>,
    /// Texts that are measured at every checkpoint.
    #[schemars(length(max = 64))]
    #[serde(default)]
    pub evals: Vec<SuiteSpec>,
    /// Last step of the training. Default: the step at which the training plans to end.
    #[schemars(range(min = 1))]
    pub until: Option<u32>,
}

/// The settings of supervised fine-tuning.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SftSpec {
    /// A file of examples, `hub:ORG/NAME` for a data set of the hub, or `feedback:CHANNEL` for the
    /// feedback on a channel's model.
    #[schemars(
        example = "examples.jsonl",
        example = "hub:org/name:train",
        example = "feedback:stable"
    )]
    pub data: String,
    /// The columns from which fields are taken, by the names of the fields. Default: each field has
    /// its own column.
    #[schemars(schema_with = "columns_schema")]
    #[serde(default)]
    pub columns: BTreeMap<String, String>,
    /// If enabled, plain prompts become user messages, and their completions become the answers.
    #[serde(default)]
    pub chat: ChatSpec,
    /// The training.
    #[serde(default)]
    pub training: TrainingSpec,
    /// The adapter that is trained. Absent: all weights are trained.
    pub lora: Option<LoraAdapterSpec>,
}

impl RunSpec {
    /// Checks that an adapter is for modules that the models of the table of architectures have.
    ///
    /// # Errors
    /// When `target_modules` has another name.
    pub fn check_usual_modules(&self) -> Result<(), FieldError> {
        let of_raft = self.raft.as_ref().map(|raft| ("raft.lora", &raft.lora));
        let of_sft = self.sft.as_ref().and_then(|sft| Some(("sft.lora", sft.lora.as_ref()?)));
        let adapter = of_raft.or(of_sft);
        adapter.map_or(Ok(()), |(section, lora)| lora.check_usual_modules(section))
    }

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

    /// Returns the names of the files that the spec names, without feedback, data sets of the hub
    /// and directories.
    pub fn file_names(&self) -> Vec<&str> {
        let base = self.base.init.iter().flat_map(|init| init.file_fields().map(|it| it.1));
        let is_file =
            |name: &&str| [FEEDBACK_PREFIX, HUB_PREFIX].iter().all(|it| !name.starts_with(it));
        base.chain(self.data_names().into_iter().map(|(_, name)| name).filter(is_file)).collect()
    }

    /// Returns the channels whose feedback the spec names as data.
    pub fn feedback_channels(&self) -> Vec<&str> {
        let names = self.data_names().into_iter().map(|(_, name)| name);
        let mut channels: Vec<&str> =
            names.filter_map(|name| name.strip_prefix(FEEDBACK_PREFIX)).collect();
        channels.sort_unstable();
        channels.dedup();
        channels
    }

    /// Returns the data that the spec names, each with its field.
    pub fn data_names(&self) -> Vec<(String, &str)> {
        let sft = self.sft.iter().map(|sft| ("sft.data".to_owned(), sft.data.as_str()));
        let raft = self.raft.iter().flat_map(|raft| {
            let heldout = raft.heldout.as_ref().and_then(|held| held.file_name());
            let heldout = heldout.map(|name| ("raft.heldout".to_owned(), name));
            [Some(("raft.prompts".to_owned(), raft.prompts.as_str())), heldout]
                .into_iter()
                .flatten()
        });
        let evals = self.evals.iter().enumerate().flat_map(|(index, suite)| {
            let named = |name: &str| format!("evals[{index}].{name}");
            let text = suite.text.as_deref().map(|text| (named("text"), text));
            let prompts = suite.prompts.as_deref().map(|prompts| (named("prompts"), prompts));
            [text, prompts].into_iter().flatten()
        });
        sft.chain(raft).chain(evals).collect()
    }
}

/// Describes lists of distinct values by key. Which keys a sweep may have depends on the spec.
fn sweep_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "minProperties": 1,
        "additionalProperties": { "type": "array", "minItems": 1, "uniqueItems": true },
    })
}

fn example_sweep() -> Value {
    json!({ "learning_rate": [0.0001, 0.0002], "seed": [1, 2] })
}

fn default_name() -> String {
    "run".to_owned()
}
fn default_pool() -> String {
    "default".to_owned()
}
