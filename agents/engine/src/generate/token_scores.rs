//! Log-probabilities of single tokens: of those that were drawn, of a prompt's, and of the most likely
//! ones beside them.

use crate::model::LanguageModel;
use crate::ops::{host_f32, loss::row_logprobs, run_vectorised};
use candle_core::{Device, Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// The log-probabilities that a request wants beside those of the tokens that are drawn for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScoreOptions {
    /// The number of most likely tokens to report at each position.
    pub alternatives: usize,
    /// True to score the prompt's tokens too.
    pub prompt: bool,
}

/// A token and its log-probability in nats, over the whole vocabulary at temperature 1.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenScore {
    pub token: u32,
    pub logprob: f64,
    /// The most likely tokens at this position, the likeliest first; on ties the lower token id.
    pub alternatives: Vec<(u32, f64)>,
}

/// The rows of logits that are in memory at once.
const SCORED_ROWS_MAX: usize = 64;

/// Scores the tokens of a prompt but its first, which nothing precedes. `rows` are the prompt's rows
/// in `hidden`.
pub(super) fn score_prompt(
    model: &LanguageModel,
    hidden: &Tensor,
    rows: Range<usize>,
    prompt: &[u32],
    alternatives: usize,
) -> Result<Vec<TokenScore>> {
    let mut scores = Vec::with_capacity(prompt.len());
    let followed: Vec<u32> = (rows.start as u32..rows.end.saturating_sub(1) as u32).collect();
    let blocks = followed.chunks(SCORED_ROWS_MAX);
    for (rows, targets) in blocks.zip(prompt[1..].chunks(SCORED_ROWS_MAX)) {
        let rows = Tensor::new(rows, &model.device)?;
        let logits = logits_on_cpu(model, &hidden.index_select(&rows, 0)?)?;
        let vocabulary = logits.dim(1)?;
        let logits = host_f32(&logits)?;
        let scored = logits.par_chunks_exact(vocabulary).zip(targets.par_iter());
        let scored = scored.map(|(row, token)| score_token(row, *token, alternatives));
        scores.extend(scored.collect::<Vec<_>>());
    }
    Ok(scores)
}

/// Computes a row of logits for each row of hidden states.
pub(super) fn logits_on_cpu(model: &LanguageModel, hidden: &Tensor) -> Result<Tensor> {
    model.compute_logits(hidden)?.to_device(&Device::Cpu)?.contiguous()
}

/// Scores a token with one row of logits.
pub(super) fn score_token(logits: &[f32], token: u32, alternatives: usize) -> TokenScore {
    let likely = most_likely(logits, alternatives);
    let targets: Vec<u32> = std::iter::once(token).chain(likely).collect();
    let logprobs = run_vectorised(
        #[inline(always)]
        || row_logprobs(logits, &targets),
    );
    let mut scored = targets.into_iter().zip(logprobs);
    let logprob = scored.next().map_or(f64::NAN, |(_, logprob)| logprob);
    TokenScore { token, logprob, alternatives: scored.collect() }
}

fn most_likely(logits: &[f32], count: usize) -> Vec<u32> {
    if count == 0 {
        return Vec::new();
    }
    let order = |a: &u32, b: &u32| {
        logits[*b as usize].total_cmp(&logits[*a as usize]).then_with(|| a.cmp(b))
    };
    let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
    if count < tokens.len() {
        tokens.select_nth_unstable_by(count, order);
        tokens.truncate(count);
    }
    tokens.sort_unstable_by(order);
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::loss::row_nll;

    #[test]
    fn the_likeliest_tokens_come_first_and_are_scored_as_if_drawn() {
        let logits = [0.5, 2.0, -1.0, 2.0, 1.0];
        let scored = score_token(&logits, 2, 3);
        let tokens: Vec<u32> = scored.alternatives.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [1, 3, 4]);
        for (token, logprob) in scored.alternatives.iter().chain([&(2, scored.logprob)]) {
            assert_eq!(*logprob, -row_nll(&logits, *token as usize));
        }
        assert_eq!(score_token(&logits, 0, 99).alternatives.len(), logits.len());
        assert!(score_token(&logits, 0, 0).alternatives.is_empty());
    }
}
