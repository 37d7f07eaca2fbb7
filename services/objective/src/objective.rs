//! An objective with its settings, as specs and commands name it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use wire::v1;

use crate::{
    ObjectiveLoss, RatioRule, Requirement, SettingError, SettingKey,
    settings::{COMMON_KEYS, CORRECTION_KEYS},
};

/// The name of an objective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObjectiveName {
    Raft,
    Ssd,
    Dft,
    RaftPlusPlus,
    ReinforceRej,
    Rloo,
    Grpo,
    DrGrpo,
    Dapo,
    Gspo,
    Cispo,
    Dpo,
    Simpo,
    Orpo,
    Kto,
    Distillation,
}

/// An objective with the values of all its settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Objective {
    name: ObjectiveName,
    /// `None` for a setting that has no default and was not set.
    values: BTreeMap<SettingKey, Option<f64>>,
    /// True if the samples were drawn by other weights than those from which training starts.
    off_policy: bool,
}

impl ObjectiveName {
    pub const ALL: [Self; 16] = [
        Self::Raft,
        Self::Ssd,
        Self::Dft,
        Self::RaftPlusPlus,
        Self::ReinforceRej,
        Self::Rloo,
        Self::Grpo,
        Self::DrGrpo,
        Self::Dapo,
        Self::Gspo,
        Self::Cispo,
        Self::Dpo,
        Self::Simpo,
        Self::Orpo,
        Self::Kto,
        Self::Distillation,
    ];

    /// Returns the name in specs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raft => "raft",
            Self::Ssd => "ssd",
            Self::Dft => "dft",
            Self::RaftPlusPlus => "raft_plus_plus",
            Self::ReinforceRej => "reinforce_rej",
            Self::Rloo => "rloo",
            Self::Grpo => "grpo",
            Self::DrGrpo => "dr_grpo",
            Self::Dapo => "dapo",
            Self::Gspo => "gspo",
            Self::Cispo => "cispo",
            Self::Dpo => "dpo",
            Self::Simpo => "simpo",
            Self::Orpo => "orpo",
            Self::Kto => "kto",
            Self::Distillation => "distillation",
        }
    }

    /// Describes the objective in a line, with its paper.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Raft => "likelihood of the kept samples (RAFT, arXiv 2304.06767)",
            Self::Ssd => {
                "likelihood of all samples, without a verifier (self-distillation, arXiv 2604.01193)"
            }
            Self::Dft => {
                "likelihood of all samples, each token weighted by its probability (DFT, arXiv \
                 2508.05629)"
            }
            Self::RaftPlusPlus => {
                "likelihood of the best samples, with clipped ratios (RAFT++, arXiv 2504.11343)"
            }
            Self::ReinforceRej => {
                "policy gradient on prompts whose rewards differ (Reinforce-Rej, arXiv 2504.11343)"
            }
            Self::Rloo => {
                "policy gradient; the baseline is the mean reward of a prompt's other samples (RLOO, \
                 arXiv 2402.14740)"
            }
            Self::Grpo => {
                "policy gradient with clipped ratios and rewards normalised by prompt (GRPO, arXiv \
                 2402.03300)"
            }
            Self::DrGrpo => {
                "GRPO without division by the deviation of rewards or the length (Dr. GRPO, arXiv \
                 2503.20783)"
            }
            Self::Dapo => {
                "GRPO with a higher upper bound of ratios, averaged over tokens (DAPO, arXiv \
                 2503.14476)"
            }
            Self::Gspo => "GRPO with one ratio for a whole sequence (GSPO, arXiv 2507.18071)",
            Self::Cispo => {
                "policy gradient with ratios that are limited, not dropped (CISPO, arXiv 2506.13585)"
            }
            Self::Dpo => {
                "the better sample of a pair gains more over the reference (DPO, arXiv 2305.18290)"
            }
            Self::Simpo => {
                "the better sample of a pair wins by a margin, without a reference (SimPO, arXiv \
                 2405.14734)"
            }
            Self::Orpo => {
                "likelihood of the better sample of a pair, and its odds against the worse (ORPO, \
                 arXiv 2403.07691)"
            }
            Self::Kto => {
                "samples that pass gain and others lose, without pairs (KTO, arXiv 2402.01306)"
            }
            Self::Distillation => {
                "log-probabilities of a teacher, on the model's own samples (on-policy distillation, \
                 arXiv 2306.13649)"
            }
        }
    }

    /// Finds an objective by its name in specs.
    ///
    /// # Errors
    /// No objective has this name; the error lists all.
    pub fn find(name: &str) -> Result<Self, SettingError> {
        let found = Self::ALL.into_iter().find(|it| it.as_str() == name);
        let known = || Self::ALL.map(Self::as_str).join(", ");
        found.ok_or_else(|| SettingError::NoObjective { name: name.to_owned(), known: known() })
    }
}

impl Objective {
    /// Creates an objective with the settings of its paper.
    pub fn new(name: ObjectiveName) -> Self {
        let common = COMMON_KEYS.map(|key| (key, Some(0.0)));
        let own = default_settings(name).iter().copied();
        Self { name, values: own.chain(common).collect(), off_policy: false }
    }

    /// Converts the message of facts.
    ///
    /// # Errors
    /// When there is no such objective, or a setting is not valid.
    pub fn from_message(message: &v1::Objective) -> Result<Self, SettingError> {
        let mut objective = Self::new(ObjectiveName::find(&message.name)?);
        objective.off_policy = message.off_policy;
        for (key, value) in &message.settings {
            objective.set(key, *value)?;
        }
        objective.check_settings()?;
        Ok(objective)
    }

    /// Returns the message of facts.
    pub fn to_message(&self) -> v1::Objective {
        let plain = Self::new(self.name);
        let changed = self.values.iter().filter(|(key, value)| plain.values[*key] != **value);
        let settings = changed.filter_map(|(key, value)| Some((key.to_string(), (*value)?)));
        v1::Objective {
            name: self.name.as_str().to_owned(),
            settings: settings.collect(),
            off_policy: self.off_policy,
        }
    }

    /// Sets whether the samples were drawn by other weights than those from which training starts.
    pub fn set_off_policy(&mut self, off_policy: bool) {
        self.off_policy = off_policy;
    }

    /// Returns true if samples need the log-probabilities with which they were drawn: for a
    /// correction, or for ratios if other weights drew them.
    pub fn uses_drawn_logprobs(&self) -> bool {
        self.has_correction() || (self.off_policy && self.needs_behaviour())
    }

    /// Returns true if the engine that trains must score the samples before the training, with the
    /// weights from which it starts: for ratios, and for a mean gain.
    pub fn scores_before_training(&self) -> bool {
        let has_baseline = matches!(self.loss(), ObjectiveLoss::Desirable(_));
        has_baseline || self.has_correction() || (self.needs_behaviour() && !self.off_policy)
    }

    /// Returns true if the reference is a teacher, whose log-probabilities come with the samples.
    /// Otherwise the engine that trains scores the reference.
    pub fn uses_teacher(&self) -> bool {
        let ObjectiveLoss::Policy(policy) = self.loss() else { return false };
        matches!(policy.ratio, RatioRule::Teacher { .. })
    }

    fn needs_behaviour(&self) -> bool {
        self.requirements().contains(&Requirement::BehaviourLogprobs)
    }

    /// Returns the name.
    pub fn name(&self) -> ObjectiveName {
        self.name
    }

    /// Returns each setting with its value, `None` where one must be set.
    pub fn settings(&self) -> impl Iterator<Item = (SettingKey, Option<f64>)> + '_ {
        self.values.iter().map(|(key, value)| (*key, *value))
    }

    /// Changes a setting. `clip` stands for `clip_low` and `clip_high`.
    ///
    /// # Errors
    /// When the objective has no such setting, or the value is out of range.
    pub fn set(&mut self, key: &str, value: f64) -> Result<(), SettingError> {
        let objective = self.name.as_str();
        let is_named = |it: &SettingKey| {
            let both = [SettingKey::ClipLow, SettingKey::ClipHigh];
            it.as_str() == key || (key == "clip" && both.contains(it))
        };
        let keys: Vec<SettingKey> = self.values.keys().copied().filter(is_named).collect();
        if keys.is_empty() {
            let known = self.values.keys().map(|key| key.as_str()).collect::<Vec<_>>().join(", ");
            return Err(SettingError::Unknown { objective, key: key.to_owned(), known });
        }
        for key in keys {
            let (min, max) = key.range();
            if !(min..=max).contains(&value) {
                return Err(SettingError::OutOfRange { objective, key, value, min, max });
            }
            self.values.insert(key, Some(value));
        }
        Ok(())
    }

    /// Checks that no setting is missing and none excludes another.
    ///
    /// # Errors
    /// With the first setting that is missing or excluded.
    pub fn check_settings(&self) -> Result<(), SettingError> {
        let objective = self.name.as_str();
        if let Some((key, _)) = self.values.iter().find(|(_, value)| value.is_none()) {
            let meaning = key.meaning();
            return Err(SettingError::Missing { objective, key: *key, meaning });
        }
        let mut corrections = CORRECTION_KEYS.into_iter().filter(|key| self.value(*key) > 0.0);
        if let (Some(first), Some(second)) = (corrections.next(), corrections.next()) {
            return Err(SettingError::Excluded { objective, first, second });
        }
        Ok(())
    }

    /// Returns the value of a setting, 0 if the objective does not have it.
    pub fn value(&self, key: SettingKey) -> f64 {
        self.values.get(&key).copied().flatten().unwrap_or(0.0)
    }

    pub(crate) fn has_correction(&self) -> bool {
        CORRECTION_KEYS.into_iter().any(|key| self.value(key) > 0.0)
    }
}

/// Returns the settings that an objective has besides the common ones, with their defaults; `None`
/// where a value must be set.
fn default_settings(name: ObjectiveName) -> &'static [(SettingKey, Option<f64>)] {
    use SettingKey::{
        Beta, ClipHigh, ClipLow, Desirable, Gamma, Lambda, MaxGap, MaxRatio, MaxTokens, MinReward,
        Nll, Undesirable,
    };
    match name {
        ObjectiveName::Raft | ObjectiveName::Ssd | ObjectiveName::Dft | ObjectiveName::Rloo => &[],
        ObjectiveName::Distillation => &[(MaxGap, Some(0.0))],
        ObjectiveName::RaftPlusPlus | ObjectiveName::ReinforceRej | ObjectiveName::Grpo => {
            &[(ClipLow, Some(0.2)), (ClipHigh, Some(0.2))]
        }
        ObjectiveName::DrGrpo => &[(ClipLow, Some(0.2)), (ClipHigh, Some(0.2)), (MaxTokens, None)],
        ObjectiveName::Dapo => &[(ClipLow, Some(0.2)), (ClipHigh, Some(0.28))],
        ObjectiveName::Gspo => &[(ClipLow, Some(3e-4)), (ClipHigh, Some(4e-4))],
        ObjectiveName::Cispo => &[(MaxRatio, Some(5.0))],
        ObjectiveName::Dpo => &[(Beta, Some(0.1)), (Nll, Some(0.0))],
        ObjectiveName::Simpo => &[(Beta, Some(2.5)), (Gamma, Some(1.375))],
        ObjectiveName::Orpo => &[(Lambda, Some(0.1))],
        ObjectiveName::Kto => &[
            (Beta, Some(0.1)),
            (Desirable, Some(1.0)),
            (Undesirable, Some(1.0)),
            (MinReward, Some(0.5)),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_found_and_read_from_a_spec() {
        for name in ObjectiveName::ALL {
            assert_eq!(ObjectiveName::find(name.as_str()), Ok(name));
            let quoted = format!("{:?}", name.as_str());
            assert_eq!(serde_json::from_str::<ObjectiveName>(&quoted).unwrap(), name);
            assert!(name.meaning().contains(", arXiv 2"), "{}", name.meaning());
        }
        let unknown = ObjectiveName::find("ppo").unwrap_err().to_string();
        assert!(unknown.contains("must be one of: raft, ssd"), "{unknown}");
        let mut dapo = Objective::new(ObjectiveName::Dapo);
        dapo.set("kl", 0.5).unwrap();
        assert_eq!(dapo.to_message().settings, [("kl".to_owned(), 0.5)].into());
        assert_eq!(Objective::from_message(&dapo.to_message()), Ok(dapo));
    }

    #[test]
    fn settings_are_checked() {
        let mut grpo = Objective::new(ObjectiveName::Grpo);
        assert!(grpo.check_settings().is_ok());
        grpo.set("clip", 0.3).unwrap();
        assert_eq!(grpo.value(SettingKey::ClipLow), 0.3);
        assert_eq!(grpo.value(SettingKey::ClipHigh), 0.3);
        let unknown = grpo.set("gama", 1.0).unwrap_err().to_string();
        assert!(unknown.contains("clip_low, clip_high"), "{unknown}");
        assert!(matches!(grpo.set("kl", -1.0), Err(SettingError::OutOfRange { .. })));
        assert!(matches!(grpo.set("kl", f64::NAN), Err(SettingError::OutOfRange { .. })));
        grpo.set("truncate_tokens", 2.0).unwrap();
        grpo.set("mask_sequences", 2.0).unwrap();
        assert!(matches!(grpo.check_settings(), Err(SettingError::Excluded { .. })));
        let mut dr_grpo = Objective::new(ObjectiveName::DrGrpo);
        assert!(matches!(dr_grpo.check_settings(), Err(SettingError::Missing { .. })));
        dr_grpo.set("max_tokens", 64.0).unwrap();
        assert!(dr_grpo.check_settings().is_ok());
    }
}
