//! Prompt and completion as one sequence of tokens, of which the completion and the end-of-sequence
//! token are scored. Training and scoring share this conversion.

use crate::tokenizer::{ModelTokenizer, TokenizerError};
use formats::TokenLimits;
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
    /// All tokens of an episode, of which the masked ranges are not scored: a model did not draw
    /// them. The ranges are ascending and do not overlap.
    Masked { tokens: Vec<u32>, masked: Vec<Range<usize>> },
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
    /// The positions whose tokens are predicted, but for the masked ones; never 0, because no token
    /// precedes it.
    pub scored: Range<usize>,
    /// Ranges of `scored` that are not predicted, ascending and without overlap.
    pub masked: Vec<Range<usize>>,
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
    #[error(
        "the masked tokens {start} to {end} of a completion of {tokens} tokens are out of bounds, or not in ascending order (D101)"
    )]
    Masked { start: usize, end: usize, tokens: usize },
}

impl TokenSequence {
    /// Tokenizes an example as a training does.
    ///
    /// # Errors
    /// When the model has no end token, or a token is not in its vocabulary.
    pub fn from_example<'a>(
        tokenizer: &ModelTokenizer,
        limits: impl Into<TokenLimits<'a>>,
        example: &CompletionExample,
    ) -> Result<Self, SequenceError> {
        let CompletionExample { prompt, completion, tokens } = example;
        Self::from_texts(tokenizer, limits.into(), [prompt, completion], tokens)
    }

    /// Like [`Self::from_example`], of a prompt and its completion.
    pub(crate) fn from_texts(
        tokenizer: &ModelTokenizer,
        limits: TokenLimits<'_>,
        [prompt, completion]: [&str; 2],
        ending: &CompletionTokens,
    ) -> Result<Self, SequenceError> {
        let mut tokens = tokenizer.encode_prompt(prompt)?;
        let scored_from = tokens.len().max(1);
        match ending {
            CompletionTokens::Ended => {
                let end = *limits.eos_tokens.first().ok_or(SequenceError::NoEndToken)?;
                tokens.extend(tokenizer.encode_continuation(completion)?);
                tokens.push(end);
            }
            CompletionTokens::Cut => tokens.extend(tokenizer.encode_continuation(completion)?),
            CompletionTokens::Exact(exact) => tokens.extend(exact),
            CompletionTokens::Masked { tokens: all, .. } => tokens.extend(all),
        }
        check_vocabulary(&tokens, limits)?;
        let masked = match ending {
            CompletionTokens::Masked { tokens: all, masked } => {
                shift_masked(masked, all.len(), tokens.len() - all.len())?
            }
            _ => Vec::new(),
        };
        let scored = scored_from..tokens.len().max(scored_from);
        Ok(Self { tokens, scored, masked, completion_bytes: completion.len() })
    }

    /// Returns the positions whose tokens are predicted.
    pub fn scored_positions(&self) -> impl Iterator<Item = usize> {
        unmasked_positions(&self.scored, &self.masked)
    }

    /// Returns the number of predicted tokens.
    pub fn scored_count(&self) -> usize {
        self.scored.len() - self.masked.iter().map(Range::len).sum::<usize>()
    }
}

/// Returns the positions of a range that are in no masked range.
pub(crate) fn unmasked_positions(
    scored: &Range<usize>,
    masked: &[Range<usize>],
) -> impl Iterator<Item = usize> {
    scored.clone().filter(|position| !masked.iter().any(|range| range.contains(position)))
}

/// Moves masked ranges of a completion of `tokens` tokens behind its prompt. The first token may
/// not be masked, because a completion begins with drawn tokens.
fn shift_masked(
    masked: &[Range<usize>],
    tokens: usize,
    prompt: usize,
) -> Result<Vec<Range<usize>>, SequenceError> {
    let mut before = 1;
    for range in masked {
        let Range { start, end } = *range;
        if start < before || end < start || end > tokens {
            return Err(SequenceError::Masked { start, end, tokens });
        }
        before = end;
    }
    Ok(masked.iter().map(|range| range.start + prompt..range.end + prompt).collect())
}

pub(crate) fn check_vocabulary(
    tokens: &[u32],
    limits: TokenLimits<'_>,
) -> Result<(), SequenceError> {
    let vocab_size = limits.vocab_size;
    match tokens.iter().find(|token| **token as usize >= vocab_size) {
        Some(token) => Err(SequenceError::BeyondVocabulary { token: *token, vocab_size }),
        None => Ok(()),
    }
}
