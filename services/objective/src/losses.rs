//! The objectives, one function each, with the settings of their papers.

use crate::{
    Advantage, DesirableLoss, LossMean, Objective, ObjectiveLoss, ObjectiveName, PairLoss,
    PolicyLoss, RatioRule, Requirement, SettingKey,
};

impl Objective {
    /// Returns the loss that the objective's paper defines.
    pub fn loss(&self) -> ObjectiveLoss {
        match self.name() {
            ObjectiveName::Raft => raft(),
            ObjectiveName::Ssd => ssd(),
            ObjectiveName::Dft => dft(),
            ObjectiveName::RaftPlusPlus => raft_plus_plus(self),
            ObjectiveName::ReinforceRej => reinforce_rej(self),
            ObjectiveName::Rloo => rloo(),
            ObjectiveName::Grpo => grpo(self),
            ObjectiveName::DrGrpo => dr_grpo(self),
            ObjectiveName::Dapo => dapo(self),
            ObjectiveName::Gspo => gspo(self),
            ObjectiveName::Cispo => cispo(self),
            ObjectiveName::Dpo => dpo(self),
            ObjectiveName::Simpo => simpo(self),
            ObjectiveName::Orpo => orpo(self),
            ObjectiveName::Kto => kto(self),
            ObjectiveName::Distillation => distillation(self),
        }
    }

    /// Lists the properties that samples must have.
    pub fn requirements(&self) -> Vec<Requirement> {
        let (old, reference, group, rewards) = match self.loss() {
            ObjectiveLoss::Policy(policy) => (
                policy.ratio.needs_old(),
                matches!(policy.ratio, RatioRule::Teacher { .. }),
                policy.advantage.group_min() > 1,
                policy.advantage != Advantage::One,
            ),
            ObjectiveLoss::Pairs(loss) => (false, loss.needs_reference(), true, true),
            ObjectiveLoss::Desirable(_) => (false, true, false, true),
        };
        let needs = [
            (old || self.has_correction(), Requirement::BehaviourLogprobs),
            (reference || self.value(SettingKey::Kl) > 0.0, Requirement::ReferenceLogprobs),
            (group, Requirement::Groups),
            (rewards, Requirement::Rewards),
        ];
        needs.into_iter().filter_map(|(is_needed, need)| is_needed.then_some(need)).collect()
    }
}

fn policy(advantage: Advantage, ratio: RatioRule, mean: LossMean) -> ObjectiveLoss {
    ObjectiveLoss::Policy(PolicyLoss { advantage, ratio, mean })
}

fn clipped(objective: &Objective) -> RatioRule {
    RatioRule::Clipped {
        low: objective.value(SettingKey::ClipLow),
        high: objective.value(SettingKey::ClipHigh),
    }
}

/// Reward-ranked fine-tuning: the likelihood of each prompt's best sequences (arXiv:2304.06767).
fn raft() -> ObjectiveLoss {
    policy(Advantage::Best, RatioRule::Ignored, LossMean::Sequences)
}

/// Simple self-distillation: the likelihood of all sequences, without a verifier
/// (arXiv:2604.01193).
fn ssd() -> ObjectiveLoss {
    policy(Advantage::One, RatioRule::Ignored, LossMean::Sequences)
}

/// Dynamic fine-tuning: likelihood, with each token weighted by its own probability
/// (arXiv:2508.05629).
fn dft() -> ObjectiveLoss {
    policy(Advantage::One, RatioRule::Probability, LossMean::Sequences)
}

/// RAFT++: the best sequences, with clipped ratios (arXiv:2504.11343, section 2).
fn raft_plus_plus(objective: &Objective) -> ObjectiveLoss {
    policy(Advantage::Best, clipped(objective), LossMean::SequenceMeans)
}

/// Reinforce-Rej: rewards of -1 and 1 without a baseline; prompts on which all sequences pass or
/// all fail are left out (arXiv:2504.11343, section 4).
fn reinforce_rej(objective: &Objective) -> ObjectiveLoss {
    policy(Advantage::SignedIfMixed, clipped(objective), LossMean::SequenceMeans)
}

/// REINFORCE with the mean of a prompt's other rewards as baseline (arXiv:2402.14740).
fn rloo() -> ObjectiveLoss {
    policy(Advantage::LeaveOneOut, RatioRule::Ignored, LossMean::Sequences)
}

/// Group relative policy optimisation (arXiv:2402.03300, equation 3 without its KL term).
fn grpo(objective: &Objective) -> ObjectiveLoss {
    policy(Advantage::Standardized, clipped(objective), LossMean::SequenceMeans)
}

/// GRPO without its biases towards easy prompts and long failures (arXiv:2503.20783, section 3).
fn dr_grpo(objective: &Objective) -> ObjectiveLoss {
    let tokens = objective.value(SettingKey::MaxTokens);
    policy(Advantage::Centered, clipped(objective), LossMean::Longest { tokens })
}

/// GRPO with a higher upper bound and a mean over all tokens (arXiv:2503.14476, equation 8).
fn dapo(objective: &Objective) -> ObjectiveLoss {
    policy(Advantage::Standardized, clipped(objective), LossMean::Tokens)
}

/// Group sequence policy optimisation: GRPO with one ratio per sequence (arXiv:2507.18071, equation
/// 5).
fn gspo(objective: &Objective) -> ObjectiveLoss {
    let ratio = RatioRule::ClippedSequence {
        low: objective.value(SettingKey::ClipLow),
        high: objective.value(SettingKey::ClipHigh),
    };
    policy(Advantage::Standardized, ratio, LossMean::SequenceMeans)
}

/// Clipped importance sampling: no token is left out; its ratio is only bounded (arXiv:2506.13585,
/// equation 4).
fn cispo(objective: &Objective) -> ObjectiveLoss {
    let ratio = RatioRule::Truncated { max: objective.value(SettingKey::MaxRatio) };
    policy(Advantage::Standardized, ratio, LossMean::Tokens)
}

/// Direct preference optimisation (arXiv:2305.18290, equation 7), with the likelihood of the better
/// sequence as an option (arXiv:2404.19733).
fn dpo(objective: &Objective) -> ObjectiveLoss {
    let [beta, nll] = [SettingKey::Beta, SettingKey::Nll].map(|key| objective.value(key));
    ObjectiveLoss::Pairs(PairLoss::Dpo { beta, nll })
}

/// Simple preference optimisation: mean log-probabilities, no reference (arXiv:2405.14734, equation
/// 6).
fn simpo(objective: &Objective) -> ObjectiveLoss {
    let [beta, gamma] = [SettingKey::Beta, SettingKey::Gamma].map(|key| objective.value(key));
    ObjectiveLoss::Pairs(PairLoss::Simpo { beta, gamma })
}

/// Odds ratio preference optimisation: likelihood and preference in one loss (arXiv:2403.07691,
/// equation 6).
fn orpo(objective: &Objective) -> ObjectiveLoss {
    ObjectiveLoss::Pairs(PairLoss::Orpo { lambda: objective.value(SettingKey::Lambda) })
}

/// Kahneman-Tversky optimisation: passing and failing sequences without pairs (arXiv:2402.01306,
/// equation 8). The baseline is the mean difference from the reference, at least 0.
fn kto(objective: &Objective) -> ObjectiveLoss {
    let value = |key| objective.value(key);
    ObjectiveLoss::Desirable(DesirableLoss {
        beta: value(SettingKey::Beta),
        desirable: value(SettingKey::Desirable),
        undesirable: value(SettingKey::Undesirable),
        min_reward: value(SettingKey::MinReward),
    })
}

/// On-policy distillation: the reverse KL divergence from a teacher, token by token, of sequences
/// that the student drew (arXiv:2306.13649).
fn distillation(objective: &Objective) -> ObjectiveLoss {
    let limit = objective.value(SettingKey::MaxGap);
    let max_gap = if limit > 0.0 { limit } else { f64::INFINITY };
    policy(Advantage::One, RatioRule::Teacher { max_gap }, LossMean::Tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_follow_from_loss_and_settings() {
        use Requirement::{BehaviourLogprobs, Groups, ReferenceLogprobs, Rewards};
        let needs = |name| Objective::new(name).requirements();
        assert_eq!(needs(ObjectiveName::Ssd), []);
        assert_eq!(needs(ObjectiveName::Rloo), [Groups, Rewards]);
        assert_eq!(needs(ObjectiveName::Grpo), [BehaviourLogprobs, Groups, Rewards]);
        assert_eq!(needs(ObjectiveName::Dpo), [ReferenceLogprobs, Groups, Rewards]);
        assert_eq!(needs(ObjectiveName::Distillation), [ReferenceLogprobs]);
        let mut ssd = Objective::new(ObjectiveName::Ssd);
        ssd.set("kl", 0.1).unwrap();
        ssd.set("mask_tokens", 2.0).unwrap();
        assert_eq!(ssd.requirements(), [BehaviourLogprobs, ReferenceLogprobs]);
    }
}
