//! What the agent asks of its generating worker, and what comes back.

use std::{cmp::Reverse, path::PathBuf};

use serde::{Deserialize, Serialize};
use wire::v1;

/// One call.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    Generate(Generate),
    Adopt(Adopt),
}

/// Draw with this adapter from now on, on the base that is loaded. Asked of a worker that draws
/// nothing just now, where [`crate::Backend::adopts`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Adopt {
    /// None: with the base alone.
    pub adapter: Option<PathBuf>,
}

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

/// In the order to begin with them, each with its place: the longest first, for whatever begins
/// last draws while slots around it are empty. No sample depends on it.
pub(crate) fn longest_first(
    requests: Vec<v1::generate_order::Request>,
) -> impl Iterator<Item = (usize, v1::generate_order::Request)> {
    let mut requests: Vec<_> = requests.into_iter().enumerate().collect();
    requests.sort_by_key(|(_, request)| Reverse(request.text.len()));
    requests.into_iter()
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Done {
    pub samples: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Generated(Generated),
    Adopted,
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
    let _ = Request::deserialize(value);
    let _ = Done::deserialize(value);
    let _ = Answer::deserialize(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_begin_first_and_keep_their_places() {
        let request =
            |text: &str| v1::generate_order::Request { text: text.into(), ..Default::default() };
        let requests = ["bb", "a", "cccc", "dd"].map(request).into();
        let begun: Vec<_> = longest_first(requests).map(|(place, _)| place).collect();
        assert_eq!(begun, [2, 0, 3, 1]);
    }
}
