//! How a spec says which samples become training data.

use serde::Deserialize;
use wire::v1;

use super::curve::Curve;
use crate::{
    SubmitError,
    check::{Checked, count, ensure, within},
};

/// A named policy, and what is to be different from it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SelectionSpec {
    pub policy: PolicySpec,
    pub min_reward: Curve,
    /// `min_reward` follows the pass rate.
    pub adaptive: Option<AdaptiveSpec>,
    /// 0: all. Default: the policy's.
    pub keep_per_prompt: Option<u32>,
    /// Of all that is left in a cycle. Default: the policy's.
    pub keep_share: Option<Curve>,
    /// Only prompts with samples that passed and others that did not. Default: the policy's.
    pub mixed: Option<bool>,
    pub keep_duplicates: Option<bool>,
    pub similarity: f64,
    pub min_tokens: u32,
    pub max_tokens: u32,
    pub finished: bool,
    pub at_least: u32,
    pub floor: f64,
    pub replay: Option<ReplaySpec>,
}

/// Selections that have names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicySpec {
    /// The best sample of each prompt (RAFT, arXiv:2304.06767).
    #[default]
    Raft,
    /// All that reach the least reward, up to ten a prompt (ReST-EM, arXiv:2312.06585).
    RestEm,
    /// All that reach it, of prompts that some samples pass and some fail (Reinforce-Rej,
    /// arXiv:2504.11343).
    ReinforceRej,
    /// The better half of all that reach it, whatever the prompt, duplicates too: what halo-forge
    /// does, but for ties, which there go to the first prompts.
    TopPercent,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdaptiveSpec {
    /// The pass rate to be had.
    #[serde(default = "three_tenths")]
    pub target: f64,
    #[serde(default = "a_tenth")]
    pub step: f64,
    #[serde(default = "a_tenth")]
    pub low: f64,
    #[serde(default = "one")]
    pub high: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplaySpec {
    pub cycles: u32,
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
            policy: PolicySpec::default(),
            min_reward: Curve::Constant(0.5),
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

impl PolicySpec {
    fn keep_per_prompt(self) -> u32 {
        match self {
            Self::Raft => 1,
            Self::RestEm => 10,
            Self::ReinforceRej | Self::TopPercent => 0,
        }
    }

    fn keep_share(self) -> f64 {
        if self == Self::TopPercent { 0.5 } else { 0.0 }
    }
}

impl SelectionSpec {
    /// A policy's name alone, or the section as a spec has it.
    ///
    /// # Errors
    /// When it is neither.
    pub fn parse(text: &str) -> Result<Self, SubmitError> {
        let named = text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let yaml = if named { format!("policy: {text}") } else { text.to_owned() };
        serde_saphyr::from_str(&yaml).map_err(SubmitError::Yaml)
    }

    /// Of so many samples of a prompt, at most so many are kept.
    pub fn most_of(&self, samples: u32) -> u32 {
        match self.resolve().keep_per_prompt {
            0 => samples,
            most => most.min(samples),
        }
    }

    /// The rules as they are in the first cycle.
    pub(crate) fn resolve(&self) -> v1::Selection {
        let policy = self.policy;
        let share = self.keep_share.as_ref().map_or(policy.keep_share(), Curve::first);
        v1::Selection {
            keep_per_prompt: self.keep_per_prompt.unwrap_or(policy.keep_per_prompt()),
            min_reward: self.min_reward.first(),
            keep_share: share,
            mixed: self.mixed.unwrap_or(policy == PolicySpec::ReinforceRej),
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
            keep_duplicates: self.keep_duplicates.unwrap_or(policy == PolicySpec::TopPercent),
        }
    }

    /// The rules as they are in one cycle of so many.
    pub(crate) fn at(&self, cycle: u32, cycles: u32) -> v1::Selection {
        let rules = self.resolve();
        let share = self.keep_share.as_ref().map(|curve| curve.at(cycle, cycles));
        v1::Selection {
            min_reward: self.min_reward.at(cycle, cycles),
            keep_share: share.unwrap_or(rules.keep_share),
            ..rules
        }
    }

    pub(crate) fn check(&self, section: &str, cycles: u32) -> Checked {
        let field = |name: &str| format!("{section}.{name}");
        self.min_reward.check(&field("min_reward"), cycles, -1e9, 1e9)?;
        count(&field("keep_per_prompt"), self.keep_per_prompt.unwrap_or(0), 0, 4096)?;
        if let Some(share) = &self.keep_share {
            share.check(&field("keep_share"), cycles, 0.0, 1.0)?;
        }
        within(&field("similarity"), self.similarity, 0.0, 1.0)?;
        let remedy = "needs keep_duplicates: false";
        let drops = !self.resolve().keep_duplicates;
        ensure(drops || self.similarity <= 0.0, &field("similarity"), remedy)?;
        let (least, most) = (self.min_tokens, self.max_tokens);
        let sane = most == 0 || least <= most;
        let remedy = format!("must be 0, for no limit, or at least min_tokens ({least})");
        ensure(sane, &field("max_tokens"), remedy)?;
        ensure(self.floor.is_finite(), &field("floor"), "must be a number")?;
        if let Some(adaptive) = &self.adaptive {
            let field = |name: &str| field(&format!("adaptive.{name}"));
            within(&field("target"), adaptive.target, 0.0, 1.0)?;
            within(&field("step"), adaptive.step, 1e-6, 1e9)?;
            within(&field("low"), adaptive.low, -1e9, adaptive.high)?;
            within(&field("high"), adaptive.high, -1e9, 1e9)?;
        }
        if let Some(replay) = &self.replay {
            count(&field("replay.cycles"), replay.cycles, 1, 1000)?;
            within(&field("replay.share"), replay.share, 0.001, 100.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(yaml: &str) -> v1::Selection {
        let spec: SelectionSpec = serde_saphyr::from_str(yaml).unwrap();
        assert_eq!(spec.check("selection", 4), Ok(()), "{yaml}");
        spec.resolve()
    }

    #[test]
    fn a_policy_is_a_name_for_settings_that_can_be_changed() {
        let raft = rules("{}");
        assert_eq!((raft.keep_per_prompt, raft.keep_share, raft.mixed), (1, 0.0, false));
        assert_eq!(rules("policy: rest_em").keep_per_prompt, 10);
        assert_eq!(rules("{policy: rest_em, keep_per_prompt: 4}").keep_per_prompt, 4);
        let rejecting = rules("policy: reinforce_rej");
        assert_eq!((rejecting.keep_per_prompt, rejecting.mixed), (0, true));
        let halo = rules("policy: top_percent");
        assert_eq!((halo.keep_share, halo.keep_duplicates, halo.keep_per_prompt), (0.5, true, 0));
        assert!(!rules("{policy: top_percent, keep_duplicates: false}").keep_duplicates);
    }

    #[test]
    fn a_name_alone_is_a_policy() {
        let named = SelectionSpec::parse("rest_em").unwrap();
        assert_eq!(named.policy, PolicySpec::RestEm);
        let section = SelectionSpec::parse("{policy: rest_em, keep_per_prompt: 3}").unwrap();
        assert_eq!((section.most_of(8), section.most_of(2), named.most_of(8)), (3, 2, 8));
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
            assert_eq!(spec.check("s", 4).unwrap_err().field, field, "{yaml}");
        }
    }
}
