//! The messages between the agent and its generating worker.

use std::{cmp::Reverse, path::PathBuf};

use engine::{CompletionExample, CompletionTokens, ModelTokenizer};
use serde::{Deserialize, Serialize};
use wire::v1;

/// A request to a worker that has a policy loaded.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GeneratorRequest {
    Generate(GenerateRequest),
    Adopt(AdapterSwapRequest),
    Score(ScoreRequest),
}

/// A request for the log-probabilities of given samples.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ScoreRequest {
    pub samples: Vec<SampleToScore>,
    /// The token that ends a finished sample.
    pub end_token: u32,
}

/// A sample as it was drawn, perhaps by another model with the same tokenizer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SampleToScore {
    pub prompt: String,
    pub text: String,
    /// False if the text was cut before its end.
    pub is_finished: bool,
    /// The drawn tokens; empty if they are those of the text and, if it is finished, an end.
    pub token_ids: Vec<u32>,
}

/// A request to draw with this adapter from now on, on the base that is loaded. It is sent only to
/// a worker that draws nothing, and only if `GeneratorBackend::can_swap_adapter`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AdapterSwapRequest {
    /// `None` to draw with the base alone.
    pub adapter: Option<PathBuf>,
}

/// A request to draw samples. The seed of a sample is derived from `seed`, its prompt and its index.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GenerateRequest {
    pub sampling: v1::Sampling,
    pub seed: u64,
    pub requests: Vec<v1::generate_order::Request>,
    /// True if samples must have their log-probability, even if that costs time.
    #[serde(default)]
    pub logprobs: bool,
    /// True if samples must have the log-probability of each token.
    #[serde(default)]
    pub token_logprobs: bool,
    /// The canary text to score; empty for none.
    #[serde(default)]
    pub canary: String,
    /// If the requests are turns of episodes: for each, the tokens before its text, none before the
    /// first turn. `max_new_tokens` then limits the text of a later turn and its samples together.
    /// All their tokens are returned. A request without room for a token has no samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contexts: Option<Vec<Vec<u32>>>,
}

impl SampleToScore {
    /// Returns the sample with its tokens; `end` is the token that ended it. `None` if the model has
    /// no such token.
    pub(crate) fn to_example(
        &self,
        tokenizer: &ModelTokenizer,
        vocab_size: usize,
        end: u32,
    ) -> Option<CompletionExample> {
        let mut tokens = self.token_ids.clone();
        if tokens.is_empty() {
            tokens = tokenizer.encode_continuation(&self.text).ok()?;
            tokens.extend(self.is_finished.then_some(end));
        }
        let is_known = tokens.iter().all(|token| (*token as usize) < vocab_size);
        let (prompt, completion) = (self.prompt.clone(), self.text.clone());
        let tokens = CompletionTokens::Exact(tokens);
        is_known.then_some(CompletionExample { prompt, completion, tokens })
    }
}

/// A planned job has far fewer.
const ORDER_SAMPLES_MAX: u32 = 1 << 16;

/// Fails if there are more than one order may request.
pub(crate) fn count_samples(requests: &[v1::generate_order::Request]) -> Result<u32, String> {
    let mut samples = 0_u32;
    for v1::generate_order::Request { prompt_id, first, count, .. } in requests {
        samples = samples.saturating_add(*count);
        if samples > ORDER_SAMPLES_MAX || first.checked_add(*count).is_none() {
            return Err(format!(
                "prompt {prompt_id:?}: {count} samples from {first} exceed the limit of \
                 {ORDER_SAMPLES_MAX} samples per order"
            ));
        }
    }
    Ok(samples)
}

/// Returns the requests by descending length of their prompts, each with its index. The sample that
/// begins last draws while other slots are empty, so it should be a short one. The order changes no
/// sample.
pub(crate) fn order_longest_first(
    requests: Vec<v1::generate_order::Request>,
) -> impl Iterator<Item = (usize, v1::generate_order::Request)> {
    let mut requests: Vec<_> = requests.into_iter().enumerate().collect();
    requests.sort_by_key(|(_, request)| Reverse(request.text.len()));
    requests.into_iter()
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct GenerateProgress {
    pub samples: u32,
}

/// The answer to a request.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GeneratorAnswer {
    Generated(GeneratedSamples),
    Adopted,
    Scored(ScoredSamples),
    /// This host cannot or must not draw the samples now, for this reason; other hosts may.
    NotHere(String),
}

/// The log-probabilities of given samples.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ScoredSamples {
    pub engine: String,
    /// The log-probability of each token of each sample, including the end token, in nats. Empty for
    /// a sample that has more tokens than the model's context, a token that the model lacks, or a
    /// value that is not finite.
    pub logprobs: Vec<Vec<f64>>,
}

/// The samples that a worker has drawn.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GeneratedSamples {
    pub samples: Vec<v1::samples::Sample>,
    pub engine: String,
    /// The reason why the policy cannot be verified; empty if it was.
    #[serde(default)]
    pub caveat: String,
    /// The digest of the model's `tokenizer.json`; empty if it has none.
    #[serde(default)]
    pub tokenizer: String,
    /// The log-probabilities of the canary's tokens; empty if none were requested, or the engine
    /// does not report them.
    #[serde(default)]
    pub canary: Vec<f32>,
    /// The tokens of the prompt of each request that is a turn of an episode; empty for a request
    /// without samples.
    #[serde(default)]
    pub prompts: Vec<Vec<u32>>,
}

/// Parses a value as each message in turn, for tests with hostile input.
#[doc(hidden)]
pub fn fuzz_messages(value: &serde_json::Value) {
    // The results do not matter; only a panic would.
    let _ = GenerateRequest::deserialize(value).map(|call| count_samples(&call.requests));
    let _ = GeneratorRequest::deserialize(value);
    let _ = GenerateProgress::deserialize(value);
    let _ = GeneratorAnswer::deserialize(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_begin_first_and_keep_their_places() {
        let request =
            |text: &str| v1::generate_order::Request { text: text.into(), ..Default::default() };
        let requests = ["bb", "a", "cccc", "dd"].map(request).into();
        let begun: Vec<_> = order_longest_first(requests).map(|(place, _)| place).collect();
        assert_eq!(begun, [2, 0, 3, 1]);
    }
}
