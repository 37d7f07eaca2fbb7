//! Log-probabilities of a short text, token by token. They show which weights a model holds: equal
//! models give equal values.

use crate::adapter::AdapterError;
use crate::model::LanguageModel;
use crate::perplexity;
use crate::sequence::{SequenceError, check_vocabulary};
use crate::tokenizer::{ModelTokenizer, TokenizerError};
use formats::TokenLimits;

const CONTEXT_TOKENS_MAX: usize = 256;

/// A canary text as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CanaryText {
    pub tokens: Vec<u32>,
    /// The indices of the scored tokens, ascending.
    pub scored: Vec<usize>,
}

/// The reason why a canary text has no log-probabilities.
#[derive(Debug, thiserror::Error)]
pub enum CanaryError {
    #[error("could not tokenize the canary")]
    Tokenizer(#[from] TokenizerError),
    #[error("the canary does not fit the model")]
    Text(#[from] SequenceError),
    #[error("the canary {text:?} has no token to predict after its first; tokens: {tokens} (R114)")]
    TooShort { text: String, tokens: usize },
    #[error("could not attach the adapter to the model")]
    Adapter(#[from] AdapterError),
    #[error("tensor operation failed on the canary (X101)")]
    Tensor(#[from] candle_core::Error),
}

impl CanaryText {
    /// Tokenizes a text; special tokens in it are plain characters. At most the last 256 tokens are
    /// kept, and the last `most_scored` of them are scored. Tokens that are only part of a
    /// character are not scored, because llama.cpp's server does not report them.
    pub fn from_text<'a>(
        tokenizer: &ModelTokenizer,
        limits: impl Into<TokenLimits<'a>>,
        text: &str,
        most_scored: usize,
    ) -> Result<Self, CanaryError> {
        let limits = limits.into();
        let tokens = tokenizer.encode_plain(text)?.tokens;
        check_vocabulary(&tokens, limits)?;
        let most = CONTEXT_TOKENS_MAX.min(limits.max_positions);
        let tokens = tokens[tokens.len().saturating_sub(most)..].to_vec();
        let mut scored = Vec::new();
        for (place, token) in tokens.iter().enumerate().skip(1).rev() {
            if scored.len() == most_scored {
                break;
            }
            if !tokenizer.decode_tokens(&[*token])?.contains(char::REPLACEMENT_CHARACTER) {
                scored.push(place);
            }
        }
        if scored.is_empty() {
            return Err(CanaryError::TooShort { text: text.into(), tokens: tokens.len() });
        }
        scored.reverse();
        Ok(Self { tokens, scored })
    }

    /// Returns the natural log-probabilities of the scored tokens.
    pub fn score_tokens(&self, model: &LanguageModel) -> Result<Vec<f32>, CanaryError> {
        let first = self.scored.first().copied().unwrap_or(self.tokens.len());
        let losses = perplexity::token_losses(model, &self.tokens, first..self.tokens.len())?;
        Ok(self.scored.iter().map(|place| -losses[place - first] as f32).collect())
    }
}
