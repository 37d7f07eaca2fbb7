//! The `raft` section of a spec.

use serde::Deserialize;
use wire::v1;

use super::{
    ChatSpec, LoraSpec, Measured, SelectionSpec, TrainingSpec, VerifierSpec,
    curriculum::CurriculumSpec, curve::Curve, gates::GatesSpec, proof::ProofSpec, suite,
};
use crate::{
    check::{Checked, count, ensure, within},
    data::Held,
};

/// Reward-ranked fine-tuning.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RaftSpec {
    pub prompts: String,
    pub heldout: Option<HeldoutSpec>,
    /// Whether held-out prompts may be trained on, too.
    #[serde(default)]
    pub allow_overlap: bool,
    /// Prompts that are texts become what a user says.
    #[serde(default)]
    pub chat: ChatSpec,
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
    #[serde(default)]
    pub curriculum: CurriculumSpec,
    #[serde(default)]
    pub gates: GatesSpec,
    /// Whether each cycle trains a new adapter on the base.
    #[serde(default)]
    pub from_base: bool,
    /// 1: samples of a cycle are drawn while the one before trains, with the checkpoint before.
    #[serde(default)]
    pub staleness: u32,
    /// The pass@k to report of held-out prompts. Default: 1, and all of a prompt's samples.
    pub pass_at: Option<Vec<u32>>,
    /// Whether engines that tell how likely samples were only at a price tell it; a gate on entropy
    /// asks for it as well.
    #[serde(default)]
    pub entropy: bool,
    #[serde(default)]
    pub proof: ProofSpec,
}

/// Prompts that are measured and never trained on.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected a file, {share: 0.1} or {count: 50} of the prompts")]
pub enum HeldoutSpec {
    File(String),
    Split(SplitSpec),
}

/// Exactly one field is set.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SplitSpec {
    share: Option<f64>,
    count: Option<u32>,
}

impl SplitSpec {
    /// `None` unless exactly one is set.
    pub(crate) fn held(self) -> Option<Held> {
        match (self.share, self.count) {
            (Some(share), None) => Some(Held::Share(share)),
            (None, Some(count)) => Some(Held::Count(count)),
            _ => None,
        }
    }

    fn check(self, field: &str) -> Checked {
        match self.held() {
            Some(Held::Share(share)) => within(&format!("{field}.share"), share, 1e-6, 0.999),
            Some(Held::Count(held)) => count(&format!("{field}.count"), held, 1, u32::MAX),
            None => ensure(false, field, "write share or count, and not both"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingSpec {
    pub temperature: Curve,
    pub top_k: u32,
    pub top_p: f64,
    pub max_new_tokens: u32,
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
        Self { temperature: Curve::Constant(0.8), top_k: 0, top_p: 1.0, max_new_tokens: 256 }
    }
}

impl From<&SamplingSpec> for v1::Sampling {
    fn from(spec: &SamplingSpec) -> Self {
        let SamplingSpec { ref temperature, top_k, top_p, max_new_tokens } = *spec;
        Self { temperature: temperature.first(), top_k, top_p, max_new_tokens }
    }
}

impl RaftSpec {
    pub(crate) fn check(&self, measured: &Measured<'_>) -> Checked {
        count("raft.cycles", self.cycles, 1, 10_000)?;
        count("raft.samples_per_prompt", self.samples_per_prompt, 1, 4096)?;
        count("raft.heldout_samples_per_prompt", self.heldout_samples_per_prompt, 1, 4096)?;
        count("raft.staleness", self.staleness, 0, 1)?;
        for k in self.pass_at() {
            count("raft.pass_at", k, 1, self.heldout_samples_per_prompt)?;
        }
        if let Some(HeldoutSpec::Split(split)) = &self.heldout {
            split.check("raft.heldout")?;
        }
        self.selection.check("raft.selection", self.cycles)?;
        let (prompts, samples) = (self.prompts_per_cycle, self.samples_per_prompt);
        self.curriculum.check("raft.curriculum", self.cycles, prompts, samples)?;
        self.gates.check("raft.gates", measured)?;
        self.proof.check("raft.proof")?;
        self.sampling.check(self.cycles)?;
        self.verifier.check("raft.verifier")?;
        self.training.check("raft.training", self.cycles)?;
        let (max_tokens, made) = (self.training.max_tokens, self.sampling.max_new_tokens);
        ensure(
            max_tokens > made,
            "raft.training.max_tokens",
            format!("must be above sampling.max_new_tokens ({made}), with room for the prompt"),
        )?;
        self.lora.check("raft.lora")
    }

    pub(crate) fn pass_at(&self) -> Vec<u32> {
        suite::pass_at(self.pass_at.as_ref(), self.heldout_samples_per_prompt)
    }

    /// What changes from cycle to cycle.
    pub(crate) fn schedules(&self) -> v1::Schedules {
        let share = self.selection.keep_share.as_ref();
        v1::Schedules {
            temperature: self.sampling.temperature.values(self.cycles),
            learning_rate: self.training.learning_rate.values(self.cycles),
            min_reward: self.selection.min_reward.values(self.cycles),
            keep_share: share.map(|share| share.values(self.cycles)).unwrap_or_default(),
        }
    }
}

impl SamplingSpec {
    pub(crate) fn check(&self, cycles: u32) -> Checked {
        self.temperature.check("raft.sampling.temperature", cycles, 0.0, 10.0)?;
        within("raft.sampling.top_p", self.top_p, 1e-6, 1.0)?;
        count("raft.sampling.max_new_tokens", self.max_new_tokens, 1, 32_768)
    }
}
