//! What a generator is asked for and what it answers.

use crate::sequence::SequenceError;
use crate::tokenizer::TokenizerError;

/// How tokens are drawn. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 switch the cut off.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    pub temperature: f64,
    pub top_k: usize,
    pub top_p: f64,
    pub max_new_tokens: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// One prompt and one seed per wanted sample; `tag` comes back with every completion.
#[derive(Debug, Clone)]
pub struct Request<Tag> {
    pub tag: Tag,
    pub prompt: Prompt,
    pub seeds: Vec<u64>,
    pub sampling: Sampling,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-sequence token was drawn.
    Stop,
    /// `max_new_tokens` or the model's last position was reached.
    Length,
}

/// `tokens` includes the end-of-sequence token that stopped it; `text` does not.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion<Tag> {
    pub tag: Tag,
    /// Which of the request's seeds.
    pub index: usize,
    pub seed: u64,
    pub prompt_tokens: usize,
    pub tokens: Vec<u32>,
    pub text: String,
    pub finish: Finish,
    /// Sum over `tokens` of ln p, in nats: p as the model gives it, at temperature 1 and among the
    /// whole vocabulary, however the token was drawn.
    pub logprob: f64,
}

impl<Tag> Completion<Tag> {
    pub(super) fn with_tag<Other>(self, tag: Other) -> Completion<Other> {
        let Self { tag: _, index, seed, prompt_tokens, tokens, text, finish, logprob } = self;
        Completion { tag, index, seed, prompt_tokens, tokens, text, finish, logprob }
    }
}

/// Why one request cannot be served; the generator goes on with the others.
#[derive(Debug, thiserror::Error)]
pub enum AdmitError {
    #[error(
        "the prompt has {tokens} tokens, but the model's {positions} positions must also hold a new one; shorten the prompt (R112)"
    )]
    PromptTooLong { tokens: usize, positions: usize },
    #[error(
        "the prompt has no tokens, and this model has nothing to start from; give it some text (R112)"
    )]
    EmptyPrompt,
    #[error("sampling parameter `{field}` is {found}, expected {expected} (R112)")]
    Sampling { field: &'static str, found: String, expected: &'static str },
    #[error("could not tokenize the prompt")]
    Tokenizer(#[from] TokenizerError),
    #[error("the prompt does not fit the model")]
    Vocabulary(#[from] SequenceError),
}

impl Sampling {
    pub(super) fn check(&self) -> Result<(), AdmitError> {
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
