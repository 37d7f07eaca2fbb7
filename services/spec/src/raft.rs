//! The `raft` section of a spec.

use std::collections::BTreeMap;

use objective::ObjectiveName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1;

use crate::{
    base::BaseSpec,
    canary::CanarySpec,
    chat::ChatSpec,
    curriculum::CurriculumSpec,
    data_source::{check_columns, columns_schema},
    eval_suite::{self, MeasuredSuites},
    field_checks::{FieldResult, check_count, ensure_field},
    gates::GatesSpec,
    heldout::HeldoutSpec,
    objective::{ObjectiveContext, ObjectiveSpec, objective_schema},
    sampling::SamplingSpec,
    selection::SelectionSpec,
    training::{BaseQuantizationSpec, LoraAdapterSpec, TrainingSpec},
    verifier::VerifierSpec,
};

/// The settings of reward-ranked fine-tuning (RAFT).
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RaftSpec {
    /// A file of prompts, `hub:ORG/NAME` for a data set of the hub, or `feedback:CHANNEL` for the
    /// feedback on a channel's model.
    #[schemars(
        example = "prompts.jsonl",
        example = "hub:openai/gsm8k:main/train",
        example = "feedback:stable"
    )]
    pub prompts: String,
    /// Prompts that are measured in every cycle and never trained on.
    pub heldout: Option<HeldoutSpec>,
    /// The columns from which fields are taken in `prompts` and in a file of `heldout`, by the
    /// names of the fields. Default: each field has its own column.
    #[schemars(schema_with = "columns_schema")]
    #[serde(default)]
    pub columns: BTreeMap<String, String>,
    /// Held-out prompts may be in the training data too.
    #[serde(default)]
    pub allow_overlap: bool,
    /// If enabled, plain prompts become user messages.
    #[serde(default)]
    pub chat: ChatSpec,
    /// Number of cycles. 0: nothing is trained, and the run measures its base.
    #[schemars(range(min = 0, max = 10_000))]
    #[serde(default = "default_cycles")]
    pub cycles: u32,
    /// Prompts that a cycle samples. 0: all prompts in every cycle.
    #[serde(default)]
    pub prompts_per_cycle: u32,
    /// Training samples of each prompt in a cycle.
    #[schemars(range(min = 1, max = 4096))]
    #[serde(default = "default_samples")]
    pub samples_per_prompt: u32,
    /// Samples of each held-out prompt in a cycle.
    #[schemars(range(min = 1, max = 4096))]
    #[serde(default = "default_heldout_samples")]
    pub heldout_samples_per_prompt: u32,
    /// The settings with which samples are drawn.
    #[serde(default)]
    pub sampling: SamplingSpec,
    /// The judge of the samples. May be left out with an objective that needs no rewards: `ssd`,
    /// `dft` or `distillation`; and with `cycles: 0`.
    pub verifier: Option<VerifierSpec>,
    /// The choice of the samples that are trained on.
    #[serde(default)]
    pub selection: SelectionSpec,
    /// The training of a cycle.
    #[serde(default)]
    pub training: TrainingSpec,
    /// The loss that the training of a cycle minimises: a name, or a name with settings.
    #[schemars(schema_with = "objective_schema")]
    #[serde(default)]
    pub objective: ObjectiveSpec,
    /// The model whose log-probabilities of the samples distillation learns from. It must have the
    /// tokenizer of the base.
    pub teacher: Option<BaseSpec>,
    /// The adapter that is trained.
    #[serde(default)]
    pub lora: LoraAdapterSpec,
    /// Endpoints may generate whose weights cannot be verified by digest.
    #[serde(default)]
    pub accept_unverified_policy: bool,
    /// The choice of the prompts of a cycle, and of the number of samples of each.
    #[serde(default)]
    pub curriculum: CurriculumSpec,
    /// The actions to take when the results get worse.
    #[serde(default)]
    pub gates: GatesSpec,
    /// Each cycle trains a new adapter on the base.
    #[serde(default)]
    pub from_base: bool,
    /// 1: the samples of a cycle are drawn while the previous cycle trains, from the checkpoint
    /// before that one. 0: they are drawn from the previous cycle's checkpoint.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1))]
    pub staleness: u32,
    /// Values of k for which pass@k of held-out prompts is reported, at most
    /// `heldout_samples_per_prompt`. Default: 1 and the number of samples of a prompt.
    #[schemars(inner(range(min = 1, max = 4096)))]
    pub pass_at: Option<Vec<u32>>,
    /// All engines report log-probabilities of samples, even those that do so only at a cost in
    /// speed. A gate on entropy has the same effect.
    #[serde(default)]
    pub entropy: bool,
    /// Training samples keep the log-probability of each token, under the policy that drew them.
    #[serde(default)]
    pub token_logprobs: bool,
    /// The proof that agents sample from the policy that was ordered.
    #[serde(default)]
    pub proof: CanarySpec,
}

fn default_heldout_samples() -> u32 {
    1
}

fn default_cycles() -> u32 {
    3
}

fn default_samples() -> u32 {
    8
}

impl RaftSpec {
    /// Checks that the trainer need not prove a policy that it computes with rounded weights.
    fn check_quantization(&self) -> FieldResult {
        let is_exact = self.lora.quantize == BaseQuantizationSpec::None;
        ensure_field(
            is_exact || !self.proof.canary,
            "raft.lora.quantize",
            "nf4 changes what the trainer computes, so it cannot prove the policy; use none, or omit \
             raft.proof.canary",
        )
    }

    /// Requires something to measure of a run that trains nothing.
    fn check_cycles(&self, measured: &MeasuredSuites<'_>) -> FieldResult {
        check_count("raft.cycles", self.cycles, 0, 10_000)?;
        let has_suites = !measured.texts.is_empty() || !measured.prompt_suites.is_empty();
        ensure_field(
            self.cycles > 0 || measured.has_heldout || has_suites,
            "raft.cycles",
            "must be from 1 to 10000; 0 needs `raft.heldout` or `evals`, by which the base is \
             measured",
        )
    }

    pub(crate) fn check_fields(&self, measured: &MeasuredSuites<'_>) -> FieldResult {
        self.check_cycles(measured)?;
        let trains = self.cycles > 0;
        check_columns("raft.columns", &self.columns)?;
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
        self.check_quantization()?;
        self.sampling.check_fields(self.cycles)?;
        self.verifier.as_ref().map_or(Ok(()), |it| it.check_fields("raft.verifier"))?;
        if let Some(highest) = self.verifier.as_ref().and_then(VerifierSpec::max_reward) {
            let least = self.selection.min_reward.lowest_value(self.cycles);
            ensure_field(
                least <= highest,
                "raft.selection.min_reward",
                format!(
                    "must be at most {highest}, the highest reward of this verifier, not {least}"
                ),
            )?;
        }
        self.training.check_fields("raft.training", self.cycles)?;
        let context = ObjectiveContext {
            samples_per_prompt: self.samples_per_prompt,
            max_new_tokens: self.sampling.max_new_tokens,
            is_on_policy: self.is_on_policy(),
            replays: self.selection.replay.is_some(),
            has_token_logprobs: self.token_logprobs,
            has_verifier: self.verifier.is_some() || !trains,
            has_teacher: self.teacher.is_some(),
        };
        let objective = self.objective.check_fields("raft.objective", context)?;
        self.gates.check_objective("raft.gates", &objective)?;
        let fits = matches!(objective.name(), ObjectiveName::Raft | ObjectiveName::Ssd);
        let remedy = format!(
            "must be left out: {} is trained on one box; raft and ssd on several",
            objective.name().as_str()
        );
        ensure_field(self.training.across.is_none() || fits, "raft.training.across", remedy)?;
        let has_curriculum = self.curriculum != CurriculumSpec::default();
        let [compares, mixes] = self.selection.reads_rewards();
        for (field, is_set, judged) in [
            ("raft.heldout", self.heldout.is_some() && trains, "the samples of these prompts"),
            ("raft.curriculum", has_curriculum, "the samples that show how hard a prompt is"),
            ("raft.selection.min_reward", compares, "samples: without it, all have equal rewards"),
            ("raft.selection.mixed", mixes, "samples: without it, none passes or fails"),
        ] {
            let remedy = format!("needs `raft.verifier`, which judges {judged}");
            ensure_field(!is_set || self.verifier.is_some(), field, remedy)?;
        }
        self.check_teacher()?;
        let (max_tokens, made) = (self.training.max_tokens, self.sampling.max_new_tokens);
        ensure_field(
            max_tokens > made || !trains,
            "raft.training.max_tokens",
            format!("must be above sampling.max_new_tokens ({made}), with room for the prompt"),
        )?;
        self.lora.check_fields("raft.lora")
    }

    fn check_teacher(&self) -> FieldResult {
        let Some(teacher) = &self.teacher else { return Ok(()) };
        teacher.check_fields("raft.teacher")?;
        let remedy = "a teacher needs trained weights; use model or checkpoint";
        ensure_field(teacher.init.is_none(), "raft.teacher.init", remedy)?;
        let plays = self.verifier.as_ref().is_some_and(|it| it.environment.is_some());
        let remedy = "must be left out: a teacher does not score episodes with an environment";
        ensure_field(!plays, "raft.teacher", remedy)
    }

    /// Converts the section to its form in the `spec` fact. The digests and counts of the prompt
    /// files, the prompt suites and the teacher are left empty, for the submission to fill in. `measured` are
    /// the run's suites, to which gates refer.
    pub fn to_proto(&self, measured: &MeasuredSuites<'_>) -> v1::spec::Raft {
        v1::spec::Raft {
            prompts: None,
            prompt_count: 0,
            heldout: None,
            heldout_count: 0,
            cycles: self.cycles,
            prompts_per_cycle: self.prompts_per_cycle,
            samples_per_prompt: self.samples_per_prompt,
            heldout_samples_per_prompt: self.heldout_samples_per_prompt,
            sampling: Some((&self.sampling).into()),
            verifier: self.verifier.as_ref().and_then(VerifierSpec::to_proto),
            selection: Some(self.selection.to_proto()),
            training: Some(v1::Training {
                objective: self
                    .objective
                    .to_proto(self.sampling.max_new_tokens, self.is_on_policy()),
                ..self.training.to_proto(Some(&self.lora))
            }),
            accept_unverified_policy: self.accept_unverified_policy,
            schedules: Some(self.schedules_to_proto()),
            curriculum: Some(self.curriculum.to_proto(self.cycles)),
            gates: Some(self.gates.to_proto(measured)),
            from_base: self.from_base,
            staleness: self.staleness,
            pass_at: self.pass_at_values(),
            prompt_suites: Vec::new(),
            entropy: self.entropy || self.gates.entropy.is_some(),
            proof: Some(self.proof.to_proto()),
            token_logprobs: self.token_logprobs,
            teacher: None,
            dataset: None,
            end_token: 0,
        }
    }

    /// Returns true if the samples of a cycle are drawn by the weights from which its training
    /// starts.
    fn is_on_policy(&self) -> bool {
        self.staleness == 0 && !self.from_base
    }

    /// Returns the values of k for which pass@k of held-out prompts is reported: the given ones,
    /// otherwise 1 and the number of samples of a held-out prompt.
    pub(crate) fn pass_at_values(&self) -> Vec<u32> {
        eval_suite::default_pass_at(self.pass_at.as_ref(), self.heldout_samples_per_prompt)
    }

    /// Returns the settings that change from cycle to cycle, in their form in the `spec` fact; the
    /// list of a setting that is constant is empty.
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
