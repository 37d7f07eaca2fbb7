//! The losses of objectives, and the parts of which they consist.

use std::fmt;

use crate::{Advantage, BatchTotals, PairLoss, RatioRule};

/// The loss that an objective's paper defines.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ObjectiveLoss {
    /// Each sequence has a loss of its own.
    Policy(PolicyLoss),
    /// Each pair of a better and a worse sequence of one prompt has a loss.
    Pairs(PairLoss),
    /// Kahneman-Tversky: each sequence has a loss relative to the mean gain of all.
    Desirable(DesirableLoss),
}

impl ObjectiveLoss {
    /// Returns the advantage of sequences; `None` for a loss of pairs.
    pub fn advantage(&self) -> Option<Advantage> {
        match self {
            Self::Policy(policy) => Some(policy.advantage),
            Self::Pairs(_) => None,
            Self::Desirable(loss) => Some(Advantage::Passes { min_reward: loss.min_reward }),
        }
    }
}

/// The settings of a loss of single sequences that pass or fail.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DesirableLoss {
    pub beta: f64,
    /// The importance of sequences that pass.
    pub desirable: f64,
    /// The importance of sequences that fail.
    pub undesirable: f64,
    /// The least reward of a sequence that passes.
    pub min_reward: f64,
}

/// A loss of single sequences: advantage and ratio weigh the tokens, `mean` divides their sum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolicyLoss {
    pub advantage: Advantage,
    pub ratio: RatioRule,
    pub mean: LossMean,
}

/// The mean by which the losses of tokens become the loss of a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossMean {
    /// Sum over a sequence's tokens, mean over sequences.
    Sequences,
    /// Mean over a sequence's tokens, mean over sequences.
    SequenceMeans,
    /// Sum over a sequence's tokens divided by a constant, mean over sequences.
    Longest { tokens: f64 },
    /// Mean over all tokens.
    Tokens,
}

impl LossMean {
    /// Returns the number that divides the weight of each token of a sequence.
    #[expect(clippy::cast_precision_loss, reason = "counts of tokens are far below 2^52")]
    pub(crate) fn divisor(self, tokens: usize, totals: &BatchTotals) -> f64 {
        let sequences = totals.sequences as f64;
        match self {
            Self::Sequences => sequences,
            Self::SequenceMeans => sequences * tokens as f64,
            Self::Longest { tokens } => sequences * tokens,
            Self::Tokens => totals.tokens as f64,
        }
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BehaviourLogprobs => "log-probabilities when drawn",
            Self::ReferenceLogprobs => "log-probabilities of a reference",
            Self::Groups => "two samples per prompt",
            Self::Rewards => "rewards",
        })
    }
}

/// Something that samples must have for an objective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Requirement {
    /// Log-probabilities of the policy that drew the samples.
    BehaviourLogprobs,
    /// Log-probabilities of the reference or teacher.
    ReferenceLogprobs,
    /// At least two samples per prompt.
    Groups,
    /// Rewards of a verifier.
    Rewards,
}
