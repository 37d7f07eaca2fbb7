//! What the agent asks of its training worker, and what it is told on the way.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use wire::v1;

/// Checkpoints saved and not yet published; the worker waits when there are more.
pub(crate) const UNPUBLISHED_MAX: usize = 2;

/// Train, and save into numbered directories below `out`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Train {
    pub base: PathBuf,
    /// What an adapter calls its base: the same on every machine.
    pub base_name: String,
    pub random_init: bool,
    pub adapter: Option<PathBuf>,
    pub dataset: PathBuf,
    pub training: v1::Training,
    pub seed: u64,
    pub out: PathBuf,
}

/// After a step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Step {
    pub step: u32,
    pub steps: u32,
    /// Mean over the steps since the last saved one.
    pub loss: f64,
    pub learning_rate: f64,
    /// Tokens passed through the model since the start.
    pub tokens: u64,
    /// Where this step's weights are, if it was saved.
    pub saved: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Trained {}

/// Reads a value as each message in turn, for tests with hostile input.
#[doc(hidden)]
pub fn fuzz(value: &serde_json::Value) {
    // Whether it is one is of no interest.
    let _ = Train::deserialize(value);
    let _ = Step::deserialize(value);
    let _ = Trained::deserialize(value);
}
