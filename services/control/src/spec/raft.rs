//! The `raft` section of a spec.

use serde::Deserialize;
use wire::v1;

use super::{LoraSpec, TrainingSpec, VerifierSpec};
use crate::check::{Checked, count, ensure, within};

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

fn one() -> u32 {
    1
}

fn three() -> u32 {
    3
}

fn eight() -> u32 {
    8
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

impl From<&SamplingSpec> for v1::Sampling {
    fn from(spec: &SamplingSpec) -> Self {
        let SamplingSpec { temperature, top_k, top_p, max_new_tokens } = *spec;
        Self { temperature, top_k, top_p, max_new_tokens }
    }
}

impl RaftSpec {
    pub(crate) fn check(&self) -> Checked {
        count("raft.cycles", self.cycles, 1, 10_000)?;
        count("raft.samples_per_prompt", self.samples_per_prompt, 1, 4096)?;
        count("raft.heldout_samples_per_prompt", self.heldout_samples_per_prompt, 1, 4096)?;
        count("raft.selection.keep_per_prompt", self.selection.keep_per_prompt, 1, 4096)?;
        let min_reward = self.selection.min_reward;
        ensure(min_reward.is_finite(), "raft.selection.min_reward", "must be a number")?;
        self.sampling.check()?;
        self.verifier.check()?;
        self.training.check("raft.training")?;
        let (max_tokens, made) = (self.training.max_tokens, self.sampling.max_new_tokens);
        ensure(
            max_tokens > made,
            "raft.training.max_tokens",
            format!("must be above sampling.max_new_tokens ({made}), with room for the prompt"),
        )?;
        self.lora.check("raft.lora")
    }
}

impl SamplingSpec {
    pub(crate) fn check(&self) -> Checked {
        within("raft.sampling.temperature", self.temperature, 0.0, 10.0)?;
        within("raft.sampling.top_p", self.top_p, 1e-6, 1.0)?;
        count("raft.sampling.max_new_tokens", self.max_new_tokens, 1, 32_768)
    }
}
