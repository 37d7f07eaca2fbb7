//! Perplexity of a text, or of prompt and completion pairs, by three protocols. All sums are f64.
//!
//! Bits per byte divide the summed loss by the UTF-8 bytes of text: for chunks, the bytes of the
//! scored tokens (a token that is part of a character counts that character's bytes); for a sliding
//! window, the bytes of the whole text; for a document, the bytes of the completion (an end token
//! has 0). To compare different tokenizers, use the sliding window or documents, which read every
//! byte.

use crate::model::LanguageModel;
use crate::ops::{attention::causal_attention, loss::ScoredRows, matmul::MatmulPhase, run_on_pool};
use crate::sequence::{
    CompletionTokens, SequenceError, TokenSequence, check_vocabulary, unmasked_positions,
};
use crate::tokenizer::{EncodedText, ModelTokenizer, TokenizerError};
use candle_core::Tensor;
use std::ops::Range;

/// A measured perplexity.
#[derive(Debug, Clone, PartialEq)]
pub struct PerplexityScore {
    pub perplexity: f64,
    pub stderr: f64,
    /// In nats per token.
    pub mean_nll: f64,
    /// The summed loss in bits, per byte of text.
    pub bits_per_byte: f64,
    /// Scored tokens.
    pub tokens: usize,
    /// Chunks, windows or documents.
    pub chunks: usize,
    pub engine: String,
}

/// A document to score: `prompt` is context, `completion` and the end token are scored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoredDocument {
    pub prompt: String,
    pub completion: String,
}

/// The reason why a perplexity cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum PerplexityError {
    #[error(
        "the text has {tokens} tokens, but a context of {context} needs at least {needed}; use a longer text or a smaller context (R114)"
    )]
    TooShort { tokens: usize, context: usize, needed: usize },
    #[error(
        "a context of {context} tokens is not possible: this model and protocol need {least} to {most} (R114)"
    )]
    Context { context: usize, least: usize, most: usize },
    #[error(
        "a stride of {stride} tokens is not possible: a context of {context} needs 1 to {context} (R114)"
    )]
    Stride { stride: usize, context: usize },
    #[error(
        "document {line} has {tokens} tokens but the model has {most} positions; shorten or drop it (R114)"
    )]
    DocumentTooLong { line: usize, tokens: usize, most: usize },
    #[error("document {line} could not be read")]
    Document { line: usize, source: SequenceError },
    #[error("none of the {documents} documents has a token to score (R114)")]
    NothingToScore { documents: usize },
    #[error("could not tokenize the text")]
    Tokenizer(#[from] TokenizerError),
    #[error("the text does not fit the model")]
    Text(#[from] SequenceError),
    #[error("tensor operation failed while scoring (X101)")]
    Tensor(#[from] candle_core::Error),
}

/// Measures by the protocol of `llama-perplexity`: drops one final newline, splits the text into
/// disjoint chunks of `context` tokens, and scores the second half of each. Scores at most `limit`
/// chunks; a remainder shorter than a chunk is ignored. `progress` is called with (finished chunks,
/// all chunks).
pub fn score_chunks(
    model: &LanguageModel,
    tokenizer: &ModelTokenizer,
    text: &str,
    context: usize,
    limit: Option<usize>,
    progress: impl FnMut(usize, usize),
) -> Result<PerplexityScore, PerplexityError> {
    check_context(model, context, 4)?;
    let text = text.strip_suffix('\n').unwrap_or(text);
    let EncodedText { mut tokens, spans } = tokenizer.encode_plain(text)?;
    check_vocabulary(&tokens, (&model.config).into())?;
    if tokens.len() < 2 * context {
        return Err(PerplexityError::TooShort {
            tokens: tokens.len(),
            context,
            needed: 2 * context,
        });
    }
    let count = (tokens.len() / context).min(limit.unwrap_or(usize::MAX)).max(1);
    if let Some(bos) = tokenizer.bos_token() {
        tokens.chunks_exact_mut(context).for_each(|chunk| chunk[0] = bos);
    }
    let scored = context / 2 + 1..context;
    let windows = (0..count).map(|chunk| {
        let start = chunk * context;
        let bytes = count_bytes(&spans, start + scored.start..start + scored.end);
        let (tokens, scored) = (&tokens[start..start + context], scored.clone());
        ScoringWindow { tokens, scored, masked: &[], bytes }
    });
    Ok(score_windows(model, &windows.collect::<Vec<_>>(), progress)?)
}

/// Measures with Hugging Face's sliding window over the text without one final newline. Every token
/// but the first is scored once, with at least `context - stride` tokens before it if the text has
/// them. With `stride == context` the first token of each window is not scored.
pub fn score_sliding(
    model: &LanguageModel,
    tokenizer: &ModelTokenizer,
    text: &str,
    context: usize,
    stride: usize,
    progress: impl FnMut(usize, usize),
) -> Result<PerplexityScore, PerplexityError> {
    check_context(model, context, 2)?;
    if !(1..=context).contains(&stride) {
        return Err(PerplexityError::Stride { stride, context });
    }
    let text = text.strip_suffix('\n').unwrap_or(text);
    let EncodedText { tokens, spans } = tokenizer.encode_plain(text)?;
    check_vocabulary(&tokens, (&model.config).into())?;
    if tokens.len() < 2 {
        return Err(PerplexityError::TooShort { tokens: tokens.len(), context, needed: 2 });
    }
    let mut windows = Vec::new();
    let (mut start, mut scored_to) = (0, 0);
    while scored_to < tokens.len() {
        let end = (start + context).min(tokens.len());
        let from = scored_to.max(start + 1).min(end);
        let bytes = count_bytes(&spans, scored_to..end);
        let scored = from - start..end - start;
        windows.push(ScoringWindow { tokens: &tokens[start..end], scored, masked: &[], bytes });
        (start, scored_to) = (start + stride, end);
    }
    Ok(score_windows(model, &windows, progress)?)
}

/// Measures documents, each in a context of its own.
pub fn score_documents(
    model: &LanguageModel,
    tokenizer: &ModelTokenizer,
    documents: &[ScoredDocument],
    progress: impl FnMut(usize, usize),
) -> Result<PerplexityScore, PerplexityError> {
    let mut sequences = Vec::with_capacity(documents.len());
    for (document, line) in documents.iter().zip(1..) {
        let texts = [document.prompt.as_str(), &document.completion];
        let ended = CompletionTokens::Ended;
        let limits = (&model.config).into();
        let sequence = TokenSequence::from_texts(tokenizer, limits, texts, &ended)
            .map_err(|source| PerplexityError::Document { line, source })?;
        let (tokens, most) = (sequence.tokens.len(), model.config.max_positions);
        if tokens > most {
            return Err(PerplexityError::DocumentTooLong { line, tokens, most });
        }
        sequences.push(sequence);
    }
    if sequences.iter().all(|sequence| sequence.scored_count() == 0) {
        return Err(PerplexityError::NothingToScore { documents: documents.len() });
    }
    let windows: Vec<ScoringWindow<'_>> =
        sequences.iter().map(ScoringWindow::from_sequence).collect();
    Ok(score_windows(model, &windows, progress)?)
}

/// Checks that a context has at least `least` tokens and fits the model.
fn check_context(
    model: &LanguageModel,
    context: usize,
    least: usize,
) -> Result<(), PerplexityError> {
    let most = model.config.max_positions;
    if (least..=most).contains(&context) {
        Ok(())
    } else {
        Err(PerplexityError::Context { context, least, most })
    }
}

struct ScoringWindow<'a> {
    tokens: &'a [u32],
    scored: Range<usize>,
    /// Ranges of `scored` that are not scored.
    masked: &'a [Range<usize>],
    /// The bytes that count for bits per byte.
    bytes: usize,
}

impl<'a> ScoringWindow<'a> {
    fn from_sequence(sequence: &'a TokenSequence) -> Self {
        let TokenSequence { tokens, scored, masked, completion_bytes } = sequence;
        Self { tokens, scored: scored.clone(), masked, bytes: *completion_bytes }
    }
}

/// Counts from the start of the range's first token to the end of its last.
pub(crate) fn count_bytes(spans: &[Range<usize>], range: Range<usize>) -> usize {
    let text = &spans[range];
    let start = text.first().map_or(0, |first| first.start);
    text.last().map_or(0, |last| last.end.saturating_sub(start))
}

/// The largest number of rows of one forward pass; a longer window has a pass of its own.
const PASS_TOKENS_MAX: usize = 2048;

fn score_windows(
    model: &LanguageModel,
    windows: &[ScoringWindow<'_>],
    progress: impl FnMut(usize, usize),
) -> candle_core::Result<PerplexityScore> {
    let losses = window_losses(model, windows, progress)?;
    Ok(summarize_losses(model, &losses, windows))
}

/// Returns the loss in nats of each scored token of all sequences.
pub(crate) fn score_sequences(
    model: &LanguageModel,
    sequences: &[&TokenSequence],
    progress: impl FnMut(usize, usize),
) -> candle_core::Result<Vec<f64>> {
    let windows = sequences.iter().map(|sequence| ScoringWindow::from_sequence(sequence));
    window_losses(model, &windows.collect::<Vec<_>>(), progress)
}

fn window_losses(
    model: &LanguageModel,
    windows: &[ScoringWindow<'_>],
    mut progress: impl FnMut(usize, usize),
) -> candle_core::Result<Vec<f64>> {
    let mut losses = Vec::new();
    let mut done = 0;
    while done < windows.len() {
        let mut rows = 0;
        let fitting = windows[done..].iter().take_while(|window| {
            rows += window.tokens.len();
            rows <= PASS_TOKENS_MAX
        });
        let pass = &windows[done..done + fitting.count().max(1)];
        losses.extend(run_on_pool(|| score_pass(model, pass))?);
        done += pass.len();
        progress(done, windows.len());
    }
    Ok(losses)
}

/// Returns the loss in nats of each scored token.
pub(crate) fn token_losses(
    model: &LanguageModel,
    tokens: &[u32],
    scored: Range<usize>,
) -> candle_core::Result<Vec<f64>> {
    let window = ScoringWindow { tokens, scored, masked: &[], bytes: 0 };
    run_on_pool(|| score_pass(model, &[window]))
}

fn score_pass(
    model: &LanguageModel,
    windows: &[ScoringWindow<'_>],
) -> candle_core::Result<Vec<f64>> {
    let (mut tokens, mut positions, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
    let (mut rows, mut targets) = (Vec::new(), Vec::new());
    for window in windows {
        let start = tokens.len();
        tokens.extend_from_slice(window.tokens);
        positions.extend(0..window.tokens.len() as u32);
        sequences.push(start..tokens.len());
        for position in unmasked_positions(&window.scored, window.masked) {
            rows.push((start + position - 1) as u32);
            targets.push(window.tokens[position]);
        }
    }
    let heads = model.head_shape();
    let hidden = model.hidden_states(
        MatmulPhase::Prefill,
        &tokens,
        &positions,
        &mut |_, query, key, value| causal_attention(&heads, query, key, value, &sequences),
    )?;
    let rows = hidden.index_select(&Tensor::new(rows.as_slice(), &model.device)?, 0)?;
    let head = model.weights.output_matrix();
    ScoredRows { hidden: &rows, head, targets: &targets }.negative_log_likelihoods()
}

fn summarize_losses(
    model: &LanguageModel,
    losses: &[f64],
    windows: &[ScoringWindow<'_>],
) -> PerplexityScore {
    let count = losses.len() as f64;
    let total: f64 = losses.iter().sum();
    let squares: f64 = losses.iter().map(|loss| loss * loss).sum();
    let bytes: usize = windows.iter().map(|window| window.bytes).sum();
    let mean_nll = total / count;
    let variance = (squares / count - mean_nll * mean_nll).max(0.0);
    let perplexity = mean_nll.exp();
    PerplexityScore {
        perplexity,
        stderr: perplexity * (variance / (count - 1.0).max(1.0)).sqrt(),
        mean_nll,
        bits_per_byte: total / std::f64::consts::LN_2 / bytes.max(1) as f64,
        tokens: losses.len(),
        chunks: windows.len(),
        engine: model.engine_name(),
    }
}
