//! Prompt and completion as one sequence of tokens, of which the completion and the end-of-sequence
//! token are scored. Training and scoring read pairs in this one way.

use crate::tokenizer::{Tokenizer, TokenizerError};
use formats::Config;
use std::ops::Range;

pub(crate) struct Sequence {
    pub(crate) tokens: Vec<u32>,
    /// Positions whose token is predicted and counted; never 0, which has nothing before it.
    pub(crate) scored: Range<usize>,
    pub(crate) completion_bytes: usize,
}

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

impl Sequence {
    pub(crate) fn of_pair(
        tokenizer: &Tokenizer,
        config: &Config,
        prompt: &str,
        completion: &str,
    ) -> Result<Self, SequenceError> {
        let end = *config.eos_tokens.first().ok_or(SequenceError::NoEndToken)?;
        let mut tokens = tokenizer.encode(prompt)?;
        let scored_from = tokens.len().max(1);
        tokens.extend(tokenizer.encode_continuation(completion)?);
        tokens.push(end);
        check_vocabulary(&tokens, config)?;
        let scored = scored_from..tokens.len().max(scored_from);
        Ok(Self { tokens, scored, completion_bytes: completion.len() })
    }
}

pub(crate) fn check_vocabulary(tokens: &[u32], config: &Config) -> Result<(), SequenceError> {
    let vocab_size = config.vocab_size;
    match tokens.iter().find(|token| **token as usize >= vocab_size) {
        Some(token) => Err(SequenceError::BeyondVocabulary { token: *token, vocab_size }),
        None => Ok(()),
    }
}
