//! Losses of pairs: a better and a worse sequence of one prompt.

/// A loss of a pair. `S` is the sum of a sequence's log-probabilities and `n` its number of tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PairLoss {
    /// `-log σ(beta · ((S - reference) of chosen - (S - reference) of rejected))`, plus `nll` times
    /// the mean negative log-likelihood of the chosen sequence.
    Dpo { beta: f64, nll: f64 },
    /// `-log σ(beta · (S / n of chosen - S / n of rejected) - gamma)`.
    Simpo { beta: f64, gamma: f64 },
    /// The mean negative log-likelihood of the chosen sequence, plus `lambda` times
    /// `-log σ(log odds of chosen - log odds of rejected)`, with the geometric mean of a sequence's
    /// probabilities.
    Orpo { lambda: f64 },
}

/// Indices of two sequences of one prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequencePair {
    pub chosen: usize,
    pub rejected: usize,
}

/// The sums of a sequence's log-probabilities, from which a loss of pairs is computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SequenceSums {
    /// The sum of the log-probabilities now, in nats.
    pub(crate) now: f64,
    /// The sum of the reference's log-probabilities, in nats; `now` without a reference.
    pub(crate) reference: f64,
    pub(crate) tokens: usize,
}

/// Pairs each sequence of the highest reward with each of the lowest, in order. Equal rewards have
/// no pairs.
pub fn find_pairs(rewards: &[f64]) -> Vec<SequencePair> {
    let best = rewards.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let worst = rewards.iter().copied().fold(f64::INFINITY, f64::min);
    if best <= worst {
        return Vec::new();
    }
    let with = |wanted: f64| (0..rewards.len()).filter(move |index| rewards[*index] == wanted);
    let pair = |chosen| with(worst).map(move |rejected| SequencePair { chosen, rejected });
    with(best).flat_map(pair).collect()
}

pub(crate) fn sigmoid(value: f64) -> f64 {
    1.0 / (1.0 + (-value).exp())
}

impl PairLoss {
    pub(crate) fn needs_reference(self) -> bool {
        matches!(self, Self::Dpo { .. })
    }

    /// Returns the weight of each token of the chosen and of the rejected sequence.
    #[expect(clippy::cast_precision_loss, reason = "a sequence has some thousand tokens")]
    pub(crate) fn weigh_pair(self, chosen: SequenceSums, rejected: SequenceSums) -> [f64; 2] {
        let [chosen_tokens, rejected_tokens] =
            [chosen, rejected].map(|sequence| sequence.tokens.max(1) as f64);
        let [chosen_mean, rejected_mean] =
            [chosen.now / chosen_tokens, rejected.now / rejected_tokens];
        match self {
            Self::Dpo { beta, nll } => {
                let gains = [chosen, rejected].map(|sums| sums.now - sums.reference);
                let weight = beta * sigmoid(-beta * (gains[0] - gains[1]));
                [weight + nll / chosen_tokens, -weight]
            }
            Self::Simpo { beta, gamma } => {
                let margin = beta * (chosen_mean - rejected_mean) - gamma;
                let weight = beta * sigmoid(-margin);
                [weight / chosen_tokens, -weight / rejected_tokens]
            }
            Self::Orpo { lambda } => {
                let [chosen_rest, rejected_rest] =
                    [chosen_mean, rejected_mean].map(probability_left);
                let odds = |mean: f64, rest: f64| mean - rest.ln();
                let margin = odds(chosen_mean, chosen_rest) - odds(rejected_mean, rejected_rest);
                let weight = lambda * sigmoid(-margin);
                [
                    (1.0 + weight / chosen_rest) / chosen_tokens,
                    -weight / (rejected_rest * rejected_tokens),
                ]
            }
        }
    }
}

/// Returns `1 - exp(mean)`, and not 0 for a certain sequence.
fn probability_left(mean: f64) -> f64 {
    (-mean.exp_m1()).max(f64::EPSILON)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_are_paired_with_the_worst() {
        let pair = |chosen, rejected| SequencePair { chosen, rejected };
        assert_eq!(find_pairs(&[0.0, 1.0, 0.5, 1.0]), [pair(1, 0), pair(3, 0)]);
        assert_eq!(find_pairs(&[1.0, 1.0]), []);
        assert_eq!(find_pairs(&[]), []);
    }
}
