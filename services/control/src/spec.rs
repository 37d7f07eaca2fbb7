//! The run spec as a user writes it: YAML, every key known, every default stated here.

mod curriculum;
mod curve;
mod gates;
mod raft;
mod selection;
mod training;
mod verifier;

use serde::Deserialize;

pub(crate) use self::{
    raft::RaftSpec,
    training::{LoraSpec, TrainingSpec},
};
pub use self::{selection::SelectionSpec, verifier::VerifierSpec};

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
}

/// Supervised fine-tuning.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SftSpec {
    pub data: String,
    #[serde(default)]
    pub training: TrainingSpec,
    /// Absent: every weight is trained.
    pub lora: Option<LoraSpec>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuiteSpec {
    pub name: String,
    /// A text file, or `.jsonl` with {"prompt", "completion"} lines of which completions are scored.
    pub text: String,
    #[serde(default = "context")]
    pub n_ctx: u32,
    #[serde(default)]
    pub stride: u32,
    #[serde(default)]
    pub chunks: u32,
}

impl RunSpec {
    /// The names of its evals.
    pub(crate) fn suites(&self) -> Vec<&str> {
        self.evals.iter().map(|eval| eval.name.as_str()).collect()
    }
}

impl SuiteSpec {
    /// A suite of a file of so many bytes, named after it. Two contexts must fit into a text: the
    /// context of a short one is as large as that allows where a token has eight bytes.
    pub fn of_file(text: &str, bytes: u64) -> Self {
        const BYTES_A_TOKEN: u64 = 8;
        let file = std::path::Path::new(text);
        let stem = file.file_stem().unwrap_or_default();
        let name = wire::slug(&stem.to_string_lossy()).unwrap_or_else(|| "text".into());
        let most = u32::try_from(bytes / BYTES_A_TOKEN / 2).unwrap_or(u32::MAX);
        let lines = file.extension().is_some_and(|extension| extension == "jsonl");
        let n_ctx = if lines { context() } else { context().min(most.max(1)) };
        // The next lower power of two.
        let n_ctx = (1 << n_ctx.ilog2()).max(SHORTEST_CONTEXT);
        Self { name, text: text.to_owned(), n_ctx, stride: 0, chunks: 0 }
    }
}

/// Fewer tokens before it say nothing of a token.
const SHORTEST_CONTEXT: u32 = 16;

fn default_name() -> String {
    "run".to_owned()
}
fn default_pool() -> String {
    "default".to_owned()
}

fn context() -> u32 {
    512
}
