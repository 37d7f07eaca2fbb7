//! Training objectives as weights of tokens.
//!
//! The loss of an objective depends on the model only through the log-probabilities `l` of the
//! tokens of sequences that were drawn before. Its gradient is therefore the sum of
//! `-w ∇l` over these tokens, with weights `w = -∂loss/∂l` that are constants for the gradient. An
//! engine trains with any objective by multiplying each token's loss by its weight.
//!
//! [`Objective`] names an objective with its settings; [`ObjectiveLoss`] is the loss that its paper
//! defines. All functions are pure. Log-probabilities are natural logarithms of single tokens.

mod advantage;
mod batch;
mod import;
mod loss;
mod losses;
mod objective;
mod pairs;
mod ratio;
mod settings;
mod token_weights;
mod weights;

pub use advantage::Advantage;
pub use batch::{BatchTotals, SequenceLogprobs};
pub use import::{LineError, read_scored_lines};
pub use loss::{DesirableLoss, LossMean, ObjectiveLoss, PolicyLoss, Requirement};
pub use objective::{Objective, ObjectiveName};
pub use pairs::{PairLoss, SequencePair, find_pairs};
pub use ratio::RatioRule;
pub use settings::{SettingError, SettingKey};
pub use token_weights::{WEIGHT_MAX, WeightedTokens};
pub use weights::{ScoredSequence, TokenWeights, WeightError, compute_weights};
