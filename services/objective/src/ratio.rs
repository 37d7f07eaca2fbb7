//! The weight of a token from its log-probabilities now and when the sequence was drawn.

use crate::SequenceLogprobs;

/// The rule by which log-probabilities of a sequence become the weights of its tokens.
///
/// `ratio` is `exp(now - old)` of a token, and `A` the advantage of its sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RatioRule {
    /// `A`.
    Ignored,
    /// `A · p`, with the token's probability `p` now.
    Probability,
    /// `A · ratio`; 0 where `A > 0` and the ratio is above `1 + high`, or `A < 0` and it is below
    /// `1 - low`.
    Clipped { low: f64, high: f64 },
    /// As `Clipped`, with the geometric mean of the sequence's ratios.
    ClippedSequence { low: f64, high: f64 },
    /// `A · min(ratio, max)`.
    Truncated { max: f64 },
    /// `teacher - now`, with the reference as teacher, at most `max_gap` from 0.
    Teacher { max_gap: f64 },
}

impl RatioRule {
    /// Returns true if log-probabilities of the policy that drew the sequence are needed.
    pub(crate) fn needs_old(self) -> bool {
        match self {
            Self::Ignored | Self::Probability | Self::Teacher { .. } => false,
            Self::Clipped { .. } | Self::ClippedSequence { .. } | Self::Truncated { .. } => true,
        }
    }

    /// Returns the weight of each token before the division by [`crate::LossMean`].
    pub(crate) fn weigh_tokens(
        self,
        advantage: f64,
        SequenceLogprobs { now, old, reference, .. }: SequenceLogprobs<'_>,
    ) -> Vec<f64> {
        let ratios = || now.iter().zip(old.unwrap_or(now)).map(|(now, old)| (now - old).exp());
        match self {
            Self::Ignored => vec![advantage; now.len()],
            Self::Probability => now.iter().map(|now| advantage * now.exp()).collect(),
            Self::Clipped { low, high } => {
                ratios().map(|ratio| weigh_clipped(advantage, ratio, low, high)).collect()
            }
            Self::ClippedSequence { low, high } => {
                let mean = mean_difference(now, old.unwrap_or(now)).exp();
                vec![weigh_clipped(advantage, mean, low, high); now.len()]
            }
            Self::Truncated { max } => ratios().map(|ratio| advantage * ratio.min(max)).collect(),
            Self::Teacher { max_gap } => {
                let pairs = now.iter().zip(reference.unwrap_or(now));
                pairs.map(|(now, wanted)| (wanted - now).clamp(-max_gap, max_gap)).collect()
            }
        }
    }
}

/// Returns the derivative of `min(ratio · A, clip(ratio, 1 - low, 1 + high) · A)` by the logarithm
/// of the ratio.
fn weigh_clipped(advantage: f64, ratio: f64, low: f64, high: f64) -> f64 {
    let is_clipped = if advantage > 0.0 { ratio > 1.0 + high } else { ratio < 1.0 - low };
    if is_clipped { 0.0 } else { advantage * ratio }
}

#[expect(clippy::cast_precision_loss, reason = "a sequence has some thousand tokens")]
fn mean_difference(now: &[f64], old: &[f64]) -> f64 {
    let sum: f64 = now.iter().zip(old).map(|(now, old)| now - old).sum();
    sum / now.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_to_the_teacher_counts_up_to_its_limit() {
        let (now, reference) = ([-0.5, -2.0, -0.1], [-0.25, -0.25, -4.0]);
        let logprobs =
            SequenceLogprobs { now: &now, old: None, behaviour: None, reference: Some(&reference) };
        let weigh = |max_gap| RatioRule::Teacher { max_gap }.weigh_tokens(1.0, logprobs);
        assert_eq!(weigh(1.0), [0.25, 1.0, -1.0]);
        assert_eq!(weigh(f64::INFINITY), [0.25, 1.75, -3.9]);
    }
}
