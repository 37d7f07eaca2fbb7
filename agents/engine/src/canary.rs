//! What a model thinks of a short text, token by token: by this, models that should be the same
//! are told apart.

use crate::adapter::AdapterError;
use crate::model::Model;
use crate::perplexity;
use crate::sequence::{SequenceError, check_vocabulary};
use crate::tokenizer::{Tokenizer, TokenizerError};
use formats::Config;

/// Of the text, so many tokens before a scored one are seen at most.
const CONTEXT: usize = 256;

/// A text, as a model reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Canary {
    pub tokens: Vec<u32>,
    /// Places of those that are scored.
    pub scored: Vec<usize>,
}

#[derive(Debug, thiserror::Error)]
pub enum CanaryError {
    #[error("could not tokenize the canary")]
    Tokenizer(#[from] TokenizerError),
    #[error("the canary does not fit the model")]
    Text(#[from] SequenceError),
    #[error("the canary {text:?} has no token to predict behind its first of {tokens} (R114)")]
    TooShort { text: String, tokens: usize },
    #[error("could not put the adapter to the model")]
    Adapter(#[from] AdapterError),
    #[error("tensor operation failed on the canary (X101)")]
    Tensor(#[from] candle_core::Error),
}

impl Canary {
    /// Special tokens are read letter by letter. Of a long text, its end is taken. Its last
    /// tokens are scored, but for parts of characters: llama.cpp's server tells nothing of them.
    ///
    /// # Errors
    /// When there is none to score, or they are not the model's.
    pub fn read(
        tokenizer: &Tokenizer,
        config: &Config,
        text: &str,
        most_scored: usize,
    ) -> Result<Self, CanaryError> {
        let tokens = tokenizer.encode_plain(text)?.tokens;
        check_vocabulary(&tokens, config)?;
        let most = CONTEXT.min(config.max_positions);
        let tokens = tokens[tokens.len().saturating_sub(most)..].to_vec();
        let mut scored = Vec::new();
        for (place, token) in tokens.iter().enumerate().skip(1).rev() {
            if scored.len() == most_scored {
                break;
            }
            if !tokenizer.decode(&[*token])?.contains(char::REPLACEMENT_CHARACTER) {
                scored.push(place);
            }
        }
        if scored.is_empty() {
            return Err(CanaryError::TooShort { text: text.into(), tokens: tokens.len() });
        }
        scored.reverse();
        Ok(Self { tokens, scored })
    }

    /// Natural logarithms of the probabilities of the scored tokens.
    ///
    /// # Errors
    /// When the model cannot be computed.
    pub fn score(&self, model: &Model) -> Result<Vec<f32>, CanaryError> {
        let first = self.scored.first().copied().unwrap_or(self.tokens.len());
        let losses = perplexity::losses(model, &self.tokens, first..self.tokens.len())?;
        Ok(self.scored.iter().map(|place| -losses[place - first] as f32).collect())
    }
}
