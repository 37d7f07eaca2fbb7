//! How much better a sequence is than others of its prompt.

/// Added to a deviation, as TRL does, so that equal rewards divide by more than 0.
const DEVIATION_MIN: f64 = 1e-4;

/// A sequence's advantage, from the rewards of its prompt's sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Advantage {
    /// 1: every sequence was selected before.
    One,
    /// 1 for the prompt's best sequences if their reward is positive, otherwise 0.
    Best,
    /// 1 for a reward of at least `min_reward`, otherwise -1.
    Passes { min_reward: f64 },
    /// `2 · reward - 1`, which maps failure and success to -1 and 1; 0 if all rewards of the prompt
    /// are equal.
    SignedIfMixed,
    /// The reward minus the mean of the prompt's other rewards.
    LeaveOneOut,
    /// The reward minus the prompt's mean.
    Centered,
    /// The reward minus the prompt's mean, divided by the unbiased standard deviation.
    Standardized,
}

impl Advantage {
    /// Returns the least size of a group for which the advantage is defined.
    pub fn group_min(self) -> usize {
        match self {
            Self::One | Self::Best | Self::Passes { .. } => 1,
            Self::SignedIfMixed | Self::LeaveOneOut | Self::Centered | Self::Standardized => 2,
        }
    }

    /// Returns the advantage of each member of a group, in order. The group has at least
    /// [`Self::group_min`] members.
    #[expect(clippy::cast_precision_loss, reason = "a prompt has few sequences")]
    pub fn compute_advantages(self, rewards: &[f64]) -> Vec<f64> {
        let count = rewards.len() as f64;
        let sum: f64 = rewards.iter().sum();
        let mean = sum / count;
        let best = rewards.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let is_mixed = rewards.iter().any(|reward| *reward != best);
        let squares: f64 = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
        let deviation = (squares / (count - 1.0)).sqrt() + DEVIATION_MIN;
        let advantage = |reward: f64| match self {
            Self::One => 1.0,
            Self::Best => f64::from(u8::from(reward == best && best > 0.0)),
            Self::Passes { min_reward } if reward >= min_reward => 1.0,
            Self::Passes { .. } => -1.0,
            Self::SignedIfMixed if is_mixed => 2.0 * reward - 1.0,
            Self::SignedIfMixed => 0.0,
            Self::LeaveOneOut => reward - (sum - reward) / (count - 1.0),
            Self::Centered => reward - mean,
            Self::Standardized => (reward - mean) / deviation,
        };
        rewards.iter().copied().map(advantage).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_near(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{found} is not {expected}");
        }
    }

    #[test]
    fn advantages_of_a_mixed_group_are_those_of_the_papers() {
        let rewards = [1.0, 0.0, 0.0, 1.0];
        assert_near(&Advantage::One.compute_advantages(&rewards), &[1.0; 4]);
        assert_near(&Advantage::Best.compute_advantages(&rewards), &[1.0, 0.0, 0.0, 1.0]);
        assert_near(
            &Advantage::SignedIfMixed.compute_advantages(&rewards),
            &[1.0, -1.0, -1.0, 1.0],
        );
        let third = 1.0 / 3.0;
        assert_near(
            &Advantage::LeaveOneOut.compute_advantages(&rewards),
            &[2.0 * third, -2.0 * third, -2.0 * third, 2.0 * third],
        );
        assert_near(&Advantage::Centered.compute_advantages(&rewards), &[0.5, -0.5, -0.5, 0.5]);
        let one = 0.5 / (third.sqrt() + 1e-4);
        assert_near(&Advantage::Standardized.compute_advantages(&rewards), &[one, -one, -one, one]);
    }

    #[test]
    fn equal_rewards_have_no_advantage() {
        for rewards in [[0.0; 3], [1.0; 3]] {
            for advantage in [
                Advantage::SignedIfMixed,
                Advantage::LeaveOneOut,
                Advantage::Centered,
                Advantage::Standardized,
            ] {
                assert_near(&advantage.compute_advantages(&rewards), &[0.0; 3]);
            }
        }
        assert_near(&Advantage::Best.compute_advantages(&[0.0, 0.0]), &[0.0, 0.0]);
        assert_near(&Advantage::Best.compute_advantages(&[0.4]), &[1.0]);
    }
}
