//! The run spec as a user writes it: YAML, every key known, every default stated here.

mod chat;
mod curriculum;
mod curve;
mod gates;
mod proof;
mod raft;
mod selection;
mod suite;
mod training;
mod verifier;

use serde::Deserialize;

pub(crate) use self::{
    chat::ChatSpec,
    raft::{HeldoutSpec, RaftSpec},
    suite::{Measure, Measured, PromptSuite},
    training::{LoraSpec, TrainingSpec},
};
pub use self::{selection::SelectionSpec, suite::SuiteSpec, verifier::VerifierSpec};

/// A run spec file.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSpec {
    /// Runs are called `<name>-<number>`.
    #[serde(default = "default_name")]
    pub name: String,
    /// Everything random in the run follows from it.
    #[serde(default)]
    pub seed: u64,
    /// Which agents may work on it.
    #[serde(default = "default_pool")]
    pub pool: String,
    pub base: BaseSpec,
    #[serde(default)]
    pub evals: Vec<SuiteSpec>,
    /// Exactly one of `sft` and `raft`.
    pub sft: Option<SftSpec>,
    pub raft: Option<RaftSpec>,
}

/// What is to be known of a training that is not ours, in a file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WatchSpec {
    /// Runs are called `<name>-<number>`. Default: the directory's name.
    pub name: Option<String>,
    /// The model adapters belong to. Default: the one they name.
    pub base: Option<BaseSpec>,
    #[serde(default)]
    pub evals: Vec<SuiteSpec>,
    /// The last step, where training may end before it planned to.
    pub until: Option<u32>,
}

/// Where training starts. Exactly one field is set.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseSpec {
    /// `RUN`, for its last checkpoint, or `RUN/CYCLE/STEP`.
    pub checkpoint: Option<String>,
    /// A Hugging Face model: its directory (as `save_pretrained` writes it, or of the hub's
    /// cache), `org/name[@revision]` of the hub, or `store:PATH`, a directory in the fleet's
    /// store.
    pub model: Option<String>,
    /// Whether the model's files go into the store; without, `auto`.
    pub upload: Option<UploadSpec>,
    /// A new model with random weights.
    pub init: Option<InitSpec>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UploadSpec {
    /// What the store does not hold.
    Auto,
    /// All of it, again.
    Always,
    /// Nothing but their digests: agents find the files on their machines, or download them from
    /// the hub.
    Never,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InitSpec {
    pub config: String,
    pub tokenizer: String,
    /// With a chat template, if the model is to chat.
    pub tokenizer_config: Option<String>,
}

/// Supervised fine-tuning.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SftSpec {
    pub data: String,
    /// Prompts that are texts become what a user says, and their completions the answers.
    #[serde(default)]
    pub chat: ChatSpec,
    #[serde(default)]
    pub training: TrainingSpec,
    /// Absent: every weight is trained.
    pub lora: Option<LoraSpec>,
}

impl InitSpec {
    /// The field, the file it names, and what that is called in a model's directory.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&'static str, &str, &'static str)> {
        let settings = self.tokenizer_config.as_deref();
        let settings =
            settings.map(|file| ("base.init.tokenizer_config", file, "tokenizer_config.json"));
        let needed = [
            ("base.init.config", self.config.as_str(), "config.json"),
            ("base.init.tokenizer", self.tokenizer.as_str(), "tokenizer.json"),
        ];
        needed.into_iter().chain(settings)
    }
}

impl RunSpec {
    /// What it measures.
    pub(crate) fn measured(&self) -> Measured<'_> {
        let names = |prompts: bool| {
            let of = self.evals.iter().filter(move |eval| eval.prompts.is_some() == prompts);
            of.map(|eval| eval.name.as_str()).collect()
        };
        let heldout = self.raft.as_ref().is_some_and(|raft| raft.heldout.is_some());
        Measured { texts: names(false), prompt_suites: names(true), heldout }
    }
}

fn default_name() -> String {
    "run".to_owned()
}
fn default_pool() -> String {
    "default".to_owned()
}
