//! Prompt and completion as one sequence of tokens, of which the completion and the end-of-sequence
//! token are scored. Training and scoring share this conversion.

use crate::tokenizer::{ModelTokenizer, TokenizerError};
use formats::ModelConfig;
use std::ops::Range;

/// A prompt and the completion to learn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompletionExample {
    pub prompt: String,
    pub completion: String,
    pub tokens: CompletionTokens,
}

/// The tokens of a completion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CompletionTokens {
    /// Those of its text, and an end.
    #[default]
    Ended,
    /// Those of its text, which was cut before its end.
    Cut,
    /// Other tokens than those of its text, the end included if it has one.
    Exact(Vec<u32>),
}

impl CompletionExample {
    /// Returns an example that ends after its completion.
    pub fn new(prompt: impl Into<String>, completion: impl Into<String>) -> Self {
        let tokens = CompletionTokens::Ended;
        Self { prompt: prompt.into(), completion: completion.into(), tokens }
    }
}

/// The tokens of a prompt and its completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenSequence {
    pub tokens: Vec<u32>,
    /// The positions whose tokens are predicted; never 0, because no token precedes it.
    pub scored: Range<usize>,
    pub(crate) completion_bytes: usize,
}

/// The reason why a text is not a sequence of the model's tokens.
#[derive(Debug, thiserror::Error)]
pub enum SequenceError {
    #[error(
        "the model's config.json names no eos_token_id to end a completion with; add it (M104)"
    )]
    NoEndToken,
    #[error(
        "the tokenizer yields token {token} but config.json says vocab_size {vocab_size}; the two files do not belong together (M110)"
    )]
    BeyondVocabulary { token: u32, vocab_size: usize },
    #[error("could not tokenize")]
    Tokenizer(#[from] TokenizerError),
}

impl TokenSequence {
    /// Tokenizes an example as a training does.
    ///
    /// # Errors
    /// When the model has no end token, or a token is not in its vocabulary.
    pub fn from_example(
        tokenizer: &ModelTokenizer,
        config: &ModelConfig,
        example: &CompletionExample,
    ) -> Result<Self, SequenceError> {
        let CompletionExample { prompt, completion, tokens } = example;
        Self::from_texts(tokenizer, config, [prompt, completion], tokens)
    }

    /// Like [`Self::from_example`], of a prompt and its completion.
    pub(crate) fn from_texts(
        tokenizer: &ModelTokenizer,
        config: &ModelConfig,
        [prompt, completion]: [&str; 2],
        ending: &CompletionTokens,
    ) -> Result<Self, SequenceError> {
        let mut tokens = tokenizer.encode_prompt(prompt)?;
        let scored_from = tokens.len().max(1);
        match ending {
            CompletionTokens::Ended => {
                let end = *config.eos_tokens.first().ok_or(SequenceError::NoEndToken)?;
                tokens.extend(tokenizer.encode_continuation(completion)?);
                tokens.push(end);
            }
            CompletionTokens::Cut => tokens.extend(tokenizer.encode_continuation(completion)?),
            CompletionTokens::Exact(exact) => tokens.extend(exact),
        }
        check_vocabulary(&tokens, config)?;
        let scored = scored_from..tokens.len().max(scored_from);
        Ok(Self { tokens, scored, completion_bytes: completion.len() })
    }
}

pub(crate) fn check_vocabulary(tokens: &[u32], config: &ModelConfig) -> Result<(), SequenceError> {
    let vocab_size = config.vocab_size;
    match tokens.iter().find(|token| **token as usize >= vocab_size) {
        Some(token) => Err(SequenceError::BeyondVocabulary { token: *token, vocab_size }),
        None => Ok(()),
    }
}
