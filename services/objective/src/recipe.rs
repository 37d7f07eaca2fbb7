//! What a paper defines: the parts of which an objective consists.

use std::fmt;

use crate::{Advantage, BatchTotals, PairLoss, RatioRule};

/// An objective's definition.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Recipe {
    /// Each sequence has a loss of its own.
    Policy(PolicyRecipe),
    /// Each pair of a better and a worse sequence of one prompt has a loss.
    Pairs(PairLoss),
    /// Kahneman-Tversky: each sequence has a loss that is compared with the mean of all.
    Desirable(DesirableLoss),
}

impl Recipe {
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

/// The definition of an objective in which each sequence has a loss of its own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolicyRecipe {
    pub advantage: Advantage,
    pub ratio: RatioRule,
    pub mean: Mean,
}

/// The number by which the sum of the tokens' losses is divided.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mean {
    /// Sum over a sequence's tokens, mean over sequences.
    Sequences,
    /// Mean over a sequence's tokens, mean over sequences.
    SequenceMeans,
    /// Sum over a sequence's tokens divided by a constant, mean over sequences.
    Longest { tokens: f64 },
    /// Mean over all tokens.
    Tokens,
}

impl Mean {
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
            Self::Groups => "two samples a prompt",
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
    /// At least two samples a prompt.
    Groups,
    /// Rewards of a verifier.
    Rewards,
}
