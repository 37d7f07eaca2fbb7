//! The `raft` section of a spec.

use serde::Deserialize;
use wire::v1;

use super::{
    ChatSpec, LoraAdapterSpec, MeasuredSuites, SelectionSpec, TrainingSpec, VerifierSpec,
    canary::CanarySpec, curriculum::CurriculumSpec, cycle_schedule::CycleSchedule, eval_suite,
    gates::GatesSpec,
};
use crate::{
    data::HeldoutSize,
    validation::{FieldResult, check_count, check_range, ensure_field},
};

/// The settings of reward-ranked fine-tuning (RAFT).
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RaftSpec {
    /// A file of prompts.
    pub prompts: String,
    /// Prompts that are measured and not trained on.
    pub heldout: Option<HeldoutSpec>,
    /// True if held-out prompts may be in the training data too.
    #[serde(default)]
    pub allow_overlap: bool,
    /// The chat settings. If enabled, plain prompts become user messages.
    #[serde(default)]
    pub chat: ChatSpec,
    /// Number of cycles.
    #[serde(default = "three")]
    pub cycles: u32,
    /// Number of prompts that a cycle samples. 0: all prompts in every cycle.
    #[serde(default)]
    pub prompts_per_cycle: u32,
    /// Training samples of each prompt in a cycle.
    #[serde(default = "eight")]
    pub samples_per_prompt: u32,
    /// Samples of each held-out prompt in a cycle.
    #[serde(default = "one")]
    pub heldout_samples_per_prompt: u32,
    #[serde(default)]
    pub sampling: SamplingSpec,
    /// The verifier that judges the samples.
    pub verifier: VerifierSpec,
    #[serde(default)]
    pub selection: SelectionSpec,
    #[serde(default)]
    pub training: TrainingSpec,
    #[serde(default)]
    pub lora: LoraAdapterSpec,
    /// True if endpoints may generate whose weights cannot be verified by digest.
    #[serde(default)]
    pub accept_unverified_policy: bool,
    #[serde(default)]
    pub curriculum: CurriculumSpec,
    #[serde(default)]
    pub gates: GatesSpec,
    /// True if each cycle trains a new adapter on the base.
    #[serde(default)]
    pub from_base: bool,
    /// 1: the samples of a cycle are drawn while the previous cycle trains, from the checkpoint
    /// before that one. 0: they are drawn from the previous cycle's checkpoint.
    #[serde(default)]
    pub staleness: u32,
    /// The values of k for which pass@k of held-out prompts is reported. Default: 1 and the number
    /// of samples of a prompt.
    pub pass_at: Option<Vec<u32>>,
    /// True if all engines report log-probabilities of samples, even those that do so only at a
    /// cost in speed. A gate on entropy has the same effect.
    #[serde(default)]
    pub entropy: bool,
    /// The canary settings.
    #[serde(default)]
    pub proof: CanarySpec,
}

/// The prompts that are measured and not trained on: a file, or a part of the prompts.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected a file, {share: 0.1} or {count: 50} of the prompts")]
pub enum HeldoutSpec {
    /// A file of its own.
    File(String),
    /// A part of the training prompts.
    Split(HeldoutSplitSpec),
}

/// The size of the held-out part. Exactly one field is set.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldoutSplitSpec {
    /// The share of prompts to hold out.
    share: Option<f64>,
    /// The number of prompts to hold out.
    count: Option<u32>,
}

impl HeldoutSplitSpec {
    /// Returns the size of the held-out part, or `None` unless exactly one field is set.
    pub(crate) fn heldout_size(self) -> Option<HeldoutSize> {
        match (self.share, self.count) {
            (Some(share), None) => Some(HeldoutSize::Share(share)),
            (None, Some(count)) => Some(HeldoutSize::Count(count)),
            _ => None,
        }
    }

    /// Checks the fields.
    fn check_fields(self, field: &str) -> FieldResult {
        match self.heldout_size() {
            Some(HeldoutSize::Share(share)) => {
                check_range(&format!("{field}.share"), share, 1e-6, 0.999)
            }
            Some(HeldoutSize::Count(held)) => {
                check_count(&format!("{field}.count"), held, 1, u32::MAX)
            }
            None => ensure_field(false, field, "write share or count, and not both"),
        }
    }
}

/// The sampling settings.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingSpec {
    /// The temperature. 0: greedy decoding.
    pub temperature: CycleSchedule,
    /// The number of most likely tokens to draw from. 0: no limit.
    pub top_k: u32,
    /// The least total probability of the tokens to draw from. 1: no limit.
    pub top_p: f64,
    /// Largest number of tokens of a sample.
    pub max_new_tokens: u32,
}

/// Returns the default of `heldout_samples_per_prompt`.
fn one() -> u32 {
    1
}

/// Returns the default of `cycles`.
fn three() -> u32 {
    3
}

/// Returns the default of `samples_per_prompt`.
fn eight() -> u32 {
    8
}

impl Default for SamplingSpec {
    fn default() -> Self {
        Self {
            temperature: CycleSchedule::Constant(0.8),
            top_k: 0,
            top_p: 1.0,
            max_new_tokens: 256,
        }
    }
}

impl From<&SamplingSpec> for v1::Sampling {
    fn from(spec: &SamplingSpec) -> Self {
        let SamplingSpec { ref temperature, top_k, top_p, max_new_tokens } = *spec;
        Self { temperature: temperature.first_value(), top_k, top_p, max_new_tokens }
    }
}

impl RaftSpec {
    /// Checks all fields of the section against the suites that the run measures.
    pub(crate) fn check_fields(&self, measured: &MeasuredSuites<'_>) -> FieldResult {
        check_count("raft.cycles", self.cycles, 1, 10_000)?;
        check_count("raft.samples_per_prompt", self.samples_per_prompt, 1, 4096)?;
        check_count("raft.heldout_samples_per_prompt", self.heldout_samples_per_prompt, 1, 4096)?;
        check_count("raft.staleness", self.staleness, 0, 1)?;
        for k in self.pass_at_values() {
            check_count("raft.pass_at", k, 1, self.heldout_samples_per_prompt)?;
        }
        if let Some(HeldoutSpec::Split(split)) = &self.heldout {
            split.check_fields("raft.heldout")?;
        }
        self.selection.check_fields("raft.selection", self.cycles)?;
        let (prompts, samples) = (self.prompts_per_cycle, self.samples_per_prompt);
        self.curriculum.check_fields("raft.curriculum", self.cycles, prompts, samples)?;
        self.gates.check_fields("raft.gates", measured)?;
        self.proof.check_fields("raft.proof")?;
        self.sampling.check_fields(self.cycles)?;
        self.verifier.check_fields("raft.verifier")?;
        self.training.check_fields("raft.training", self.cycles)?;
        let (max_tokens, made) = (self.training.max_tokens, self.sampling.max_new_tokens);
        ensure_field(
            max_tokens > made,
            "raft.training.max_tokens",
            format!("must be above sampling.max_new_tokens ({made}), with room for the prompt"),
        )?;
        self.lora.check_fields("raft.lora")
    }

    /// Returns the values of k for pass@k.
    pub(crate) fn pass_at_values(&self) -> Vec<u32> {
        eval_suite::default_pass_at(self.pass_at.as_ref(), self.heldout_samples_per_prompt)
    }

    /// Returns the settings that change from cycle to cycle, in their form in the `spec` fact.
    pub(crate) fn schedules_to_proto(&self) -> v1::Schedules {
        let share = self.selection.keep_share.as_ref();
        v1::Schedules {
            temperature: self.sampling.temperature.cycle_values(self.cycles),
            learning_rate: self.training.learning_rate.cycle_values(self.cycles),
            min_reward: self.selection.min_reward.cycle_values(self.cycles),
            keep_share: share.map(|share| share.cycle_values(self.cycles)).unwrap_or_default(),
        }
    }
}

impl SamplingSpec {
    /// Checks all fields.
    pub(crate) fn check_fields(&self, cycles: u32) -> FieldResult {
        self.temperature.check_range("raft.sampling.temperature", cycles, 0.0, 10.0)?;
        check_range("raft.sampling.top_p", self.top_p, 1e-6, 1.0)?;
        check_count("raft.sampling.max_new_tokens", self.max_new_tokens, 1, 32_768)
    }
}
