//! The choice of the samples that become training data.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1;

use crate::cycle_schedule::CycleSchedule;
use crate::{
    error::SpecError,
    field_checks::{FieldResult, check_count, check_range, ensure_field},
    yaml::parse_yaml,
};

/// A named selection strategy, with settings that override it.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SelectionSpec {
    /// The named strategy whose settings the other keys override.
    pub policy: SelectionStrategySpec,
    /// Least reward of a kept sample.
    #[schemars(extend("minimum" = -1e9, "maximum" = 1e9))]
    pub min_reward: CycleSchedule,
    /// Adapts `min_reward` to the pass rate of the previous cycle.
    pub adaptive: Option<AdaptiveSpec>,
    /// Largest number of samples kept per prompt. 0: no limit. Default: the strategy's.
    #[schemars(range(min = 0, max = 4096))]
    pub keep_per_prompt: Option<u32>,
    /// Share of the remaining samples of a cycle to keep. 0: all. Default: the strategy's.
    #[schemars(extend("minimum" = 0.0, "maximum" = 1.0))]
    pub keep_share: Option<CycleSchedule>,
    /// Keep only samples of prompts with both passing and failing samples. Default: the strategy's.
    pub mixed: Option<bool>,
    /// Keep equal completions of a prompt. Default: the strategy's.
    pub keep_duplicates: Option<bool>,
    /// Jaccard similarity of word trigrams from which two completions of a prompt are duplicates.
    /// 0: only equal completions are.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub similarity: f64,
    /// Smallest number of tokens of a kept completion.
    pub min_tokens: u32,
    /// Largest number of tokens of a kept completion. 0: no limit.
    pub max_tokens: u32,
    /// Drop samples that were cut at `max_new_tokens`.
    pub finished: bool,
    /// Least number of samples to keep. Missing ones are filled with the best of those dropped by
    /// `keep_share`, then of those below `min_reward`.
    pub at_least: u32,
    /// Least reward of samples that fill up to `at_least`.
    pub floor: f64,
    /// Train on samples of earlier cycles again.
    pub replay: Option<ReplaySpec>,
}

/// The named selection strategies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SelectionStrategySpec {
    /// Keep the best sample of each prompt (RAFT, arXiv:2304.06767).
    #[default]
    Raft,
    /// Keep all samples that reach `min_reward`, up to ten of a prompt (ReST-EM, arXiv:2312.06585).
    RestEm,
    /// Keep all samples that reach `min_reward`, of prompts with both passing and failing samples.
    MixedPrompts,
    /// Keep the better half of all samples that reach `min_reward`, regardless of the prompt and
    /// including duplicates. halo-forge does the same, except that it prefers the first prompts
    /// among equal rewards.
    TopPercent,
}

/// The adaptation of `min_reward`: it rises by `step` after a cycle in which more than `target` of
/// the samples reached it, and falls after a cycle in which fewer did.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AdaptiveSpec {
    /// Pass rate to reach.
    #[schemars(range(min = 0.0, max = 1.0))]
    #[serde(default = "three_tenths")]
    pub target: f64,
    /// Change after each cycle.
    #[schemars(range(min = 1e-6, max = 1e9))]
    #[serde(default = "a_tenth")]
    pub step: f64,
    /// Lower limit of `min_reward`.
    #[schemars(range(min = -1e9, max = 1e9))]
    #[serde(default = "a_tenth")]
    pub low: f64,
    /// Upper limit of `min_reward`.
    #[schemars(range(min = -1e9, max = 1e9))]
    #[serde(default = "one")]
    pub high: f64,
}

/// The samples of earlier cycles that are trained on again.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplaySpec {
    /// Number of earlier cycles.
    #[schemars(range(min = 1, max = 1000))]
    pub cycles: u32,
    /// Largest number of replayed samples, as a share of the newly selected ones.
    #[schemars(range(min = 0.001, max = 100.0))]
    #[serde(default = "half")]
    pub share: f64,
}

fn three_tenths() -> f64 {
    0.3
}

fn a_tenth() -> f64 {
    0.1
}

fn half() -> f64 {
    0.5
}

fn one() -> f64 {
    1.0
}

impl Default for SelectionSpec {
    fn default() -> Self {
        Self {
            policy: SelectionStrategySpec::default(),
            min_reward: CycleSchedule::Constant(0.5),
            adaptive: None,
            keep_per_prompt: None,
            keep_share: None,
            mixed: None,
            keep_duplicates: None,
            similarity: 0.0,
            min_tokens: 0,
            max_tokens: 0,
            finished: false,
            at_least: 0,
            floor: 0.5,
            replay: None,
        }
    }
}

impl SelectionStrategySpec {
    fn default_keep_per_prompt(self) -> u32 {
        match self {
            Self::Raft => 1,
            Self::RestEm => 10,
            Self::MixedPrompts | Self::TopPercent => 0,
        }
    }

    fn default_keep_share(self) -> f64 {
        if self == Self::TopPercent { 0.5 } else { 0.0 }
    }
}

impl SelectionSpec {
    /// Parses the name of a strategy, or a selection section as YAML. Ranges are not checked; see
    /// [`SelectionSpec::check_fields`].
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        let named = text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let yaml = if named { format!("policy: {text}") } else { text.to_owned() };
        parse_yaml(&yaml)
    }

    /// Returns an upper bound of the samples that are kept of a prompt with `samples` samples, by
    /// `keep_per_prompt` alone.
    pub fn kept_samples_max(&self, samples: u32) -> u32 {
        match self.to_proto().keep_per_prompt {
            0 => samples,
            most => most.min(samples),
        }
    }

    /// Returns whether the section has a least reward of its own, and whether it chooses prompts by
    /// passing and failing samples.
    pub(crate) fn reads_rewards(&self) -> [bool; 2] {
        let default = Self::default().min_reward;
        [self.min_reward != default || self.adaptive.is_some(), self.to_proto().mixed]
    }

    /// Converts the section to its form in the `spec` fact, with the values of the first cycle and
    /// the defaults of its strategy.
    pub fn to_proto(&self) -> v1::Selection {
        let policy = self.policy;
        let share = self
            .keep_share
            .as_ref()
            .map_or(policy.default_keep_share(), CycleSchedule::first_value);
        v1::Selection {
            keep_per_prompt: self.keep_per_prompt.unwrap_or(policy.default_keep_per_prompt()),
            min_reward: self.min_reward.first_value(),
            keep_share: share,
            mixed: self.mixed.unwrap_or(policy == SelectionStrategySpec::MixedPrompts),
            similarity: self.similarity,
            min_tokens: self.min_tokens,
            max_tokens: self.max_tokens,
            finished: self.finished,
            at_least: self.at_least,
            floor: self.floor,
            adaptive: self.adaptive.map(|adaptive| v1::selection::Adaptive {
                target: adaptive.target,
                step: adaptive.step,
                low: adaptive.low,
                high: adaptive.high,
            }),
            replay: self
                .replay
                .map(|replay| v1::selection::Replay { cycles: replay.cycles, share: replay.share }),
            keep_duplicates: self
                .keep_duplicates
                .unwrap_or(policy == SelectionStrategySpec::TopPercent),
        }
    }

    /// Converts the section to its form in the `spec` fact, with the values of one cycle (counted
    /// from 1) of a run of `cycles` cycles.
    pub fn to_proto_at(&self, cycle: u32, cycles: u32) -> v1::Selection {
        let rules = self.to_proto();
        let share = self.keep_share.as_ref().map(|curve| curve.value_at(cycle, cycles));
        v1::Selection {
            min_reward: self.min_reward.value_at(cycle, cycles),
            keep_share: share.unwrap_or(rules.keep_share),
            ..rules
        }
    }

    /// Checks all fields, and each value that a schedule takes in `cycles` cycles. `section` is the section's path in the
    /// error, which advises how to correct the first wrong field.
    pub fn check_fields(&self, section: &str, cycles: u32) -> FieldResult {
        let field = |name: &str| format!("{section}.{name}");
        self.min_reward.check_range(&field("min_reward"), cycles, -1e9, 1e9)?;
        check_count(&field("keep_per_prompt"), self.keep_per_prompt.unwrap_or(0), 0, 4096)?;
        if let Some(share) = &self.keep_share {
            share.check_range(&field("keep_share"), cycles, 0.0, 1.0)?;
        }
        check_range(&field("similarity"), self.similarity, 0.0, 1.0)?;
        let remedy = "needs keep_duplicates: false";
        let drops = !self.to_proto().keep_duplicates;
        ensure_field(drops || self.similarity <= 0.0, &field("similarity"), remedy)?;
        let (least, most) = (self.min_tokens, self.max_tokens);
        let sane = most == 0 || least <= most;
        let remedy = format!("must be 0, for no limit, or at least min_tokens ({least})");
        ensure_field(sane, &field("max_tokens"), remedy)?;
        ensure_field(self.floor.is_finite(), &field("floor"), "must be a number")?;
        if let Some(adaptive) = &self.adaptive {
            let field = |name: &str| field(&format!("adaptive.{name}"));
            check_range(&field("target"), adaptive.target, 0.0, 1.0)?;
            check_range(&field("step"), adaptive.step, 1e-6, 1e9)?;
            check_range(&field("low"), adaptive.low, -1e9, adaptive.high)?;
            check_range(&field("high"), adaptive.high, -1e9, 1e9)?;
        }
        if let Some(replay) = &self.replay {
            check_count(&field("replay.cycles"), replay.cycles, 1, 1000)?;
            check_range(&field("replay.share"), replay.share, 0.001, 100.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(yaml: &str) -> v1::Selection {
        let spec: SelectionSpec = serde_saphyr::from_str(yaml).unwrap();
        assert_eq!(spec.check_fields("selection", 4), Ok(()), "{yaml}");
        spec.to_proto()
    }

    #[test]
    fn a_policy_is_a_name_for_settings_that_can_be_changed() {
        let raft = rules("{}");
        assert_eq!((raft.keep_per_prompt, raft.keep_share, raft.mixed), (1, 0.0, false));
        assert_eq!(rules("policy: rest_em").keep_per_prompt, 10);
        assert_eq!(rules("{policy: rest_em, keep_per_prompt: 4}").keep_per_prompt, 4);
        let rejecting = rules("policy: mixed_prompts");
        assert_eq!((rejecting.keep_per_prompt, rejecting.mixed), (0, true));
        let halo = rules("policy: top_percent");
        assert_eq!((halo.keep_share, halo.keep_duplicates, halo.keep_per_prompt), (0.5, true, 0));
        assert!(!rules("{policy: top_percent, keep_duplicates: false}").keep_duplicates);
    }

    #[test]
    fn a_name_alone_is_a_policy() {
        let named = SelectionSpec::parse("rest_em").unwrap();
        assert_eq!(named.policy, SelectionStrategySpec::RestEm);
        let section = SelectionSpec::parse("{policy: rest_em, keep_per_prompt: 3}").unwrap();
        assert_eq!(
            (section.kept_samples_max(8), section.kept_samples_max(2), named.kept_samples_max(8)),
            (3, 2, 8)
        );
        let error = SelectionSpec::parse("grpo").unwrap_err();
        assert!(format!("{error}").contains("grpo"), "{error}");
    }

    #[test]
    fn senseless_rules_are_named() {
        for (yaml, field) in [
            ("keep_share: 1.5", "s.keep_share"),
            ("{min_tokens: 9, max_tokens: 8}", "s.max_tokens"),
            ("min_reward: {linear: [0.1, 1e10]}", "s.min_reward"),
            ("adaptive: {low: 2}", "s.adaptive.low"),
            ("replay: {cycles: 0}", "s.replay.cycles"),
            ("similarity: -1", "s.similarity"),
            ("{policy: top_percent, similarity: 0.9}", "s.similarity"),
        ] {
            let spec: SelectionSpec = serde_saphyr::from_str(yaml).unwrap();
            assert_eq!(spec.check_fields("s", 4).unwrap_err().field, field, "{yaml}");
        }
    }
}
