//! Log-probabilities of completions, token by token.

use crate::model::LanguageModel;
use crate::perplexity::{PerplexityError, score_sequences};
use crate::sequence::{CompletionExample, TokenSequence};
use crate::tokenizer::ModelTokenizer;

/// Returns the natural log-probability of each token of each completion, its end token included,
/// as a training scores them. `None` for an example of more than `max_tokens` tokens, which a
/// training skips. `progress` is called with (finished examples, all examples).
///
/// # Errors
/// When an example cannot be tokenized, or a tensor operation fails.
pub fn score_completions(
    model: &LanguageModel,
    tokenizer: &ModelTokenizer,
    examples: &[CompletionExample],
    max_tokens: usize,
    progress: impl FnMut(usize, usize),
) -> Result<Vec<Option<Vec<f64>>>, PerplexityError> {
    let most = max_tokens.min(model.model_config().max_positions);
    let mut sequences = Vec::with_capacity(examples.len());
    for (example, line) in examples.iter().zip(1..) {
        let sequence = TokenSequence::from_example(tokenizer, model.model_config(), example)
            .map_err(|source| PerplexityError::Document { line, source })?;
        sequences.push(Some(sequence).filter(|it| it.tokens.len() <= most));
    }
    let fitting: Vec<&TokenSequence> = sequences.iter().flatten().collect();
    let losses = score_sequences(model, &fitting, progress)?;
    let mut rest = losses.as_slice();
    let of_sequence = |sequence: &Option<TokenSequence>| {
        let (own, others) = rest.split_at(sequence.as_ref()?.scored_count());
        rest = others;
        Some(own.iter().map(|loss| -loss).collect())
    };
    Ok(sequences.iter().map(of_sequence).collect())
}
