//! The requests and completions of a generator.

use super::token_scores::TokenScore;
use crate::sequence::SequenceError;
use crate::tokenizer::TokenizerError;
use std::sync::Arc;

/// The parameters with which tokens are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParameters {
    /// The temperature; 0 is greedy.
    pub temperature: f64,
    /// The number of most likely tokens to sample from; 0 keeps the whole vocabulary.
    pub top_k: usize,
    /// The share of the probability to sample from, above 0; 1 keeps the whole distribution.
    pub top_p: f64,
    /// The largest number of tokens to draw, at least 1.
    pub max_new_tokens: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
}

/// One prompt, and one seed for each wanted sample. Each completion carries a copy of `tag`.
#[derive(Debug, Clone)]
pub struct PromptRequest<Tag> {
    pub tag: Tag,
    pub prompt: PromptInput,
    pub seeds: Vec<u64>,
    pub sampling: SamplingParameters,
}

/// The reason why a sample ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    Stop,
    /// The sample reached `max_new_tokens` or the model's last position.
    Length,
}

/// A finished sample. `tokens` includes the end-of-sequence token that ended it; `text` does not.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleCompletion<Tag> {
    pub tag: Tag,
    /// The index of its seed in the request.
    pub index: usize,
    pub seed: u64,
    pub prompt_tokens: usize,
    pub tokens: Vec<u32>,
    pub text: String,
    pub finish: FinishReason,
    /// The log-probability of each token in nats, over the whole vocabulary at temperature 1,
    /// independent of the sampling parameters.
    pub logprobs: Vec<f64>,
    /// The most likely tokens at the position of each token, if the request wants any.
    pub alternatives: Vec<Vec<(u32, f64)>>,
    /// The scores of the prompt's tokens but its first, if the request wants them.
    pub prompt_scores: Arc<[TokenScore]>,
}

/// A sample that is still drawn.
#[derive(Debug)]
pub struct RunningTokens<'a, Tag> {
    pub tag: &'a Tag,
    /// The index of its seed in the request.
    pub index: usize,
    /// The tokens so far, and of each what [`SampleCompletion`] has.
    pub tokens: &'a [u32],
    pub logprobs: &'a [f64],
    pub alternatives: &'a [Vec<(u32, f64)>],
    pub prompt_scores: &'a Arc<[TokenScore]>,
}

impl<Tag> SampleCompletion<Tag> {
    /// Returns the log-probability of the sample in nats.
    pub fn logprob(&self) -> f64 {
        self.logprobs.iter().sum()
    }

    pub(super) fn with_tag<Other>(self, tag: Other) -> SampleCompletion<Other> {
        let Self { index, seed, prompt_tokens, tokens, text, finish, logprobs, .. } = self;
        let Self { alternatives, prompt_scores, .. } = self;
        SampleCompletion {
            tag,
            index,
            seed,
            prompt_tokens,
            tokens,
            text,
            finish,
            logprobs,
            alternatives,
            prompt_scores,
        }
    }
}

/// The reason why a request is rejected. The generator continues with the others.
#[derive(Debug, thiserror::Error)]
pub enum AdmitError {
    #[error(
        "the prompt has {tokens} tokens, but the model's {positions} positions must also hold a new one; shorten the prompt (R112)"
    )]
    PromptTooLong { tokens: usize, positions: usize },
    #[error("the prompt has no tokens, and this model has no start token; add some text (R112)")]
    EmptyPrompt,
    #[error("sampling parameter `{field}` is {found}, expected {expected} (R112)")]
    Sampling { field: &'static str, found: String, expected: &'static str },
    #[error("could not tokenize the prompt")]
    Tokenizer(#[from] TokenizerError),
    #[error("the prompt does not fit the model")]
    Vocabulary(#[from] SequenceError),
}

impl SamplingParameters {
    pub(super) fn check_ranges(&self) -> Result<(), AdmitError> {
        let Self { temperature, top_p, max_new_tokens, .. } = *self;
        let bad =
            |field, found: String, expected| Err(AdmitError::Sampling { field, found, expected });
        if !temperature.is_finite() || temperature < 0.0 {
            return bad("temperature", temperature.to_string(), "0 or more");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return bad("top_p", top_p.to_string(), "above 0 and at most 1");
        }
        if max_new_tokens == 0 {
            return bad("max_new_tokens", max_new_tokens.to_string(), "1 or more");
        }
        Ok(())
    }
}
