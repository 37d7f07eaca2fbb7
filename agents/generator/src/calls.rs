//! What the agent asks of its generating worker, and what comes back.

use serde::{Deserialize, Serialize};
use wire::v1;

/// Generate these samples. A sample's seed follows from `seed`, its prompt and its index.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Generate {
    pub sampling: v1::Sampling,
    pub seed: u64,
    pub requests: Vec<v1::generate_order::Request>,
    /// Samples tell their logprob, also where telling costs time.
    #[serde(default)]
    pub logprobs: bool,
    /// The text whose log-probabilities are to be told; empty when nobody asks.
    #[serde(default)]
    pub canary: String,
}

/// A job of a plan has far fewer.
const SAMPLES_MAX: u32 = 1 << 16;

/// How many samples are asked for.
///
/// # Errors
/// When they are more than any plan asks for at once.
pub(crate) fn samples_of(requests: &[v1::generate_order::Request]) -> Result<u32, String> {
    let mut samples = 0_u32;
    for v1::generate_order::Request { prompt_id, first, count, .. } in requests {
        samples = samples.saturating_add(*count);
        if samples > SAMPLES_MAX || first.checked_add(*count).is_none() {
            return Err(format!(
                "prompt {prompt_id:?}: {count} samples from {first} on make too many; \
                 an order may ask for {SAMPLES_MAX}"
            ));
        }
    }
    Ok(samples)
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Done {
    pub samples: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Generated(Generated),
    /// This box cannot just now, or must not; others may.
    NotHere(String),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Generated {
    pub samples: Vec<v1::samples::Sample>,
    /// What made them.
    pub engine: String,
    /// Why nobody can say that it was the policy asked for; empty when it was.
    #[serde(default)]
    pub caveat: String,
    /// Digest of its tokenizer.json; empty where there is none.
    #[serde(default)]
    pub tokenizer: String,
    /// Of the canary's tokens; empty when nobody asked, or the engine does not tell.
    #[serde(default)]
    pub canary: Vec<f32>,
}

/// Reads a value as each message in turn, for tests with hostile input.
#[doc(hidden)]
pub fn fuzz(value: &serde_json::Value) {
    // Whether it is one is of no interest.
    let _ = Generate::deserialize(value).map(|call| samples_of(&call.requests));
    let _ = Done::deserialize(value);
    let _ = Answer::deserialize(value);
}
