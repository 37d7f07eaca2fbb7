//! The run spec as a user writes it: YAML, every key known, every default stated here.

use serde::Deserialize;
use wire::v1;

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

/// Reward-ranked fine-tuning.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RaftSpec {
    pub prompts: String,
    pub heldout: Option<String>,
    #[serde(default = "three")]
    pub cycles: u32,
    /// 0: all of them in every cycle.
    #[serde(default)]
    pub prompts_per_cycle: u32,
    #[serde(default = "eight")]
    pub samples_per_prompt: u32,
    #[serde(default = "one")]
    pub heldout_samples_per_prompt: u32,
    #[serde(default)]
    pub sampling: SamplingSpec,
    pub verifier: VerifierSpec,
    #[serde(default)]
    pub selection: SelectionSpec,
    #[serde(default)]
    pub training: TrainingSpec,
    #[serde(default)]
    pub lora: LoraSpec,
    /// Whether endpoints may generate whose weights nobody can check by their digest.
    #[serde(default)]
    pub accept_unverified_policy: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingSpec {
    pub temperature: f64,
    pub top_k: u32,
    pub top_p: f64,
    pub max_new_tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SelectionSpec {
    pub keep_per_prompt: u32,
    pub min_reward: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleSpec {
    Constant,
    Linear,
    Cosine,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingSpec {
    pub epochs: u32,
    /// When set, `epochs` does not count.
    pub max_steps: u32,
    pub batch_size: u32,
    pub micro_batch_tokens: u32,
    pub learning_rate: f64,
    pub schedule: ScheduleSpec,
    pub warmup_ratio: f64,
    pub final_ratio: f64,
    pub weight_decay: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub max_grad_norm: f64,
    pub max_tokens: u32,
    pub save_every: u32,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraSpec {
    pub r: u32,
    pub alpha: f64,
    pub target_modules: Vec<String>,
}

/// Exactly one field is set.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifierSpec {
    pub exact: Option<ExactSpec>,
    pub numeric: Option<NumericSpec>,
    pub regex: Option<RegexSpec>,
    pub command: Option<CommandSpec>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExactSpec {
    pub extract: String,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NumericSpec {
    pub extract: String,
    pub tolerance: f64,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegexSpec {
    pub pattern: String,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandSpec {
    pub argv: Vec<String>,
    #[serde(default = "ten_seconds")]
    pub timeout_s: f64,
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
fn one() -> u32 {
    1
}
fn three() -> u32 {
    3
}
fn eight() -> u32 {
    8
}
fn context() -> u32 {
    512
}
fn ten_seconds() -> f64 {
    10.0
}

impl Default for SamplingSpec {
    fn default() -> Self {
        Self { temperature: 0.8, top_k: 0, top_p: 1.0, max_new_tokens: 256 }
    }
}

impl Default for SelectionSpec {
    fn default() -> Self {
        Self { keep_per_prompt: 1, min_reward: 0.5 }
    }
}

impl Default for NumericSpec {
    fn default() -> Self {
        Self { extract: String::new(), tolerance: 1e-6 }
    }
}

impl Default for LoraSpec {
    fn default() -> Self {
        let modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        let target_modules = modules.map(str::to_owned).to_vec();
        Self { r: 16, alpha: 32.0, target_modules }
    }
}

impl Default for TrainingSpec {
    fn default() -> Self {
        Self {
            epochs: 1,
            max_steps: 0,
            batch_size: 32,
            micro_batch_tokens: 0,
            learning_rate: 2e-4,
            schedule: ScheduleSpec::Cosine,
            warmup_ratio: 0.1,
            final_ratio: 0.1,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            max_grad_norm: 1.0,
            max_tokens: 1024,
            save_every: 0,
        }
    }
}

impl From<&SamplingSpec> for v1::Sampling {
    fn from(spec: &SamplingSpec) -> Self {
        let SamplingSpec { temperature, top_k, top_p, max_new_tokens } = *spec;
        Self { temperature, top_k, top_p, max_new_tokens }
    }
}

impl TrainingSpec {
    pub(crate) fn resolve(&self, lora: Option<&LoraSpec>) -> v1::Training {
        let schedule = match self.schedule {
            ScheduleSpec::Constant => v1::Schedule::Constant,
            ScheduleSpec::Linear => v1::Schedule::Linear,
            ScheduleSpec::Cosine => v1::Schedule::Cosine,
        };
        v1::Training {
            epochs: self.epochs,
            max_steps: self.max_steps,
            batch_size: self.batch_size,
            micro_batch_tokens: self.micro_batch_tokens,
            learning_rate: self.learning_rate,
            schedule: schedule.into(),
            warmup_ratio: self.warmup_ratio,
            final_ratio: self.final_ratio,
            weight_decay: self.weight_decay,
            beta1: self.beta1,
            beta2: self.beta2,
            max_grad_norm: self.max_grad_norm,
            max_tokens: self.max_tokens,
            save_every: self.save_every,
            lora: lora.map(|lora| v1::Lora {
                r: lora.r,
                alpha: lora.alpha,
                target_modules: lora.target_modules.clone(),
            }),
        }
    }
}

impl VerifierSpec {
    /// `None` unless exactly one verifier is named.
    pub(crate) fn resolve(&self) -> Option<v1::Verifier> {
        use v1::verifier::{Command, Exact, How, Numeric, Regex};
        let hows = [
            self.exact.as_ref().map(|spec| How::Exact(Exact { extract: spec.extract.clone() })),
            self.numeric.as_ref().map(|spec| {
                let extract = spec.extract.clone();
                How::Numeric(Numeric { extract, tolerance: spec.tolerance })
            }),
            self.regex.as_ref().map(|spec| How::Regex(Regex { pattern: spec.pattern.clone() })),
            self.command.as_ref().map(|spec| {
                How::Command(Command { argv: spec.argv.clone(), timeout_s: spec.timeout_s })
            }),
        ];
        let mut named = hows.into_iter().flatten();
        match (named.next(), named.next()) {
            (Some(how), None) => Some(v1::Verifier { how: Some(how) }),
            _ => None,
        }
    }
}
