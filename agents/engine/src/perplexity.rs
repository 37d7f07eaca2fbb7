//! Perplexity of a text or of prompt and completion pairs, by three protocols. All sums are f64.
//!
//! Bits per byte divide the summed loss by UTF-8 bytes of text: of the scored tokens for chunks
//! (a token that is only part of a character counts that character's bytes), of the whole text for
//! a sliding window, of the completion for a document (an end token has none). Figures of
//! different tokenizers compare by sliding window or by documents, which read every byte.

use crate::model::Model;
use crate::ops::{attention::causal_attention, loss::Scored, matmul::Phase, on_pool};
use crate::sequence::{Sequence, SequenceError, check_vocabulary};
use crate::tokenizer::{Encoded, Tokenizer, TokenizerError};
use candle_core::Tensor;
use std::ops::Range;

#[derive(Debug, Clone, PartialEq)]
pub struct Perplexity {
    pub perplexity: f64,
    /// Standard error of `perplexity`.
    pub stderr: f64,
    /// Nats a token.
    pub mean_nll: f64,
    pub bits_per_byte: f64,
    /// Scored tokens.
    pub tokens: usize,
    /// Chunks, windows or documents.
    pub chunks: usize,
    pub engine: String,
}

/// `prompt` is context, `completion` and the end token are scored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    pub prompt: String,
    pub completion: String,
}

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

/// `llama-perplexity`'s protocol: one final newline is dropped, then disjoint chunks of `context`
/// tokens, the second half of each scored; at most `limit` chunks, and a rest too short for a
/// chunk is left out. `progress` hears (chunks done, chunks in all).
pub fn chunks(
    model: &Model,
    tokenizer: &Tokenizer,
    text: &str,
    context: usize,
    limit: Option<usize>,
    progress: impl FnMut(usize, usize),
) -> Result<Perplexity, PerplexityError> {
    check_context(model, context, 4)?;
    let text = text.strip_suffix('\n').unwrap_or(text);
    let Encoded { mut tokens, spans } = tokenizer.encode_plain(text)?;
    check_vocabulary(&tokens, &model.config)?;
    if tokens.len() < 2 * context {
        return Err(PerplexityError::TooShort {
            tokens: tokens.len(),
            context,
            needed: 2 * context,
        });
    }
    let count = (tokens.len() / context).min(limit.unwrap_or(usize::MAX)).max(1);
    if let Some(bos) = tokenizer.bos() {
        tokens.chunks_exact_mut(context).for_each(|chunk| chunk[0] = bos);
    }
    let scored = context / 2 + 1..context;
    let windows = (0..count).map(|chunk| {
        let start = chunk * context;
        let bytes = bytes_of(&spans, start + scored.start..start + scored.end);
        Window { tokens: &tokens[start..start + context], scored: scored.clone(), bytes }
    });
    Ok(score(model, &windows.collect::<Vec<_>>(), progress)?)
}

/// Hugging Face's sliding window over the text less one final newline: every token but the first is scored once,
/// with at least `context - stride` tokens before it where the text has them. At
/// `stride == context` the first token of each window goes unscored.
pub fn sliding(
    model: &Model,
    tokenizer: &Tokenizer,
    text: &str,
    context: usize,
    stride: usize,
    progress: impl FnMut(usize, usize),
) -> Result<Perplexity, PerplexityError> {
    check_context(model, context, 2)?;
    if !(1..=context).contains(&stride) {
        return Err(PerplexityError::Stride { stride, context });
    }
    let text = text.strip_suffix('\n').unwrap_or(text);
    let Encoded { tokens, spans } = tokenizer.encode_plain(text)?;
    check_vocabulary(&tokens, &model.config)?;
    if tokens.len() < 2 {
        return Err(PerplexityError::TooShort { tokens: tokens.len(), context, needed: 2 });
    }
    let mut windows = Vec::new();
    let (mut start, mut scored_to) = (0, 0);
    while scored_to < tokens.len() {
        let end = (start + context).min(tokens.len());
        let from = scored_to.max(start + 1).min(end);
        let bytes = bytes_of(&spans, scored_to..end);
        let scored = from - start..end - start;
        windows.push(Window { tokens: &tokens[start..end], scored, bytes });
        (start, scored_to) = (start + stride, end);
    }
    Ok(score(model, &windows, progress)?)
}

/// Each document is its own context.
pub fn documents(
    model: &Model,
    tokenizer: &Tokenizer,
    documents: &[Document],
    progress: impl FnMut(usize, usize),
) -> Result<Perplexity, PerplexityError> {
    let mut sequences = Vec::with_capacity(documents.len());
    for (document, line) in documents.iter().zip(1..) {
        let Document { prompt, completion } = document;
        let sequence = Sequence::of_pair(tokenizer, &model.config, prompt, completion)
            .map_err(|source| PerplexityError::Document { line, source })?;
        let (tokens, most) = (sequence.tokens.len(), model.config.max_positions);
        if tokens > most {
            return Err(PerplexityError::DocumentTooLong { line, tokens, most });
        }
        sequences.push(sequence);
    }
    if sequences.iter().all(|sequence| sequence.scored.is_empty()) {
        return Err(PerplexityError::NothingToScore { documents: documents.len() });
    }
    let windows: Vec<Window<'_>> = sequences.iter().map(Window::of_sequence).collect();
    Ok(score(model, &windows, progress)?)
}

fn check_context(model: &Model, context: usize, least: usize) -> Result<(), PerplexityError> {
    let most = model.config.max_positions;
    if (least..=most).contains(&context) {
        Ok(())
    } else {
        Err(PerplexityError::Context { context, least, most })
    }
}

/// One context; `scored` are the positions whose token is predicted.
struct Window<'a> {
    tokens: &'a [u32],
    scored: Range<usize>,
    bytes: usize,
}

impl<'a> Window<'a> {
    fn of_sequence(sequence: &'a Sequence) -> Self {
        let Sequence { tokens, scored, completion_bytes } = sequence;
        Self { tokens, scored: scored.clone(), bytes: *completion_bytes }
    }
}

/// Bytes from the start of the range's first token to the end of its last.
pub(crate) fn bytes_of(spans: &[Range<usize>], range: Range<usize>) -> usize {
    let text = &spans[range];
    let start = text.first().map_or(0, |first| first.start);
    text.last().map_or(0, |last| last.end.saturating_sub(start))
}

/// Bounds the rows of one forward pass.
const PASS_TOKENS: usize = 2048;

fn score(
    model: &Model,
    windows: &[Window<'_>],
    mut progress: impl FnMut(usize, usize),
) -> candle_core::Result<Perplexity> {
    let mut losses = Vec::new();
    let mut done = 0;
    while done < windows.len() {
        let mut rows = 0;
        let fitting = windows[done..].iter().take_while(|window| {
            rows += window.tokens.len();
            rows <= PASS_TOKENS
        });
        let pass = &windows[done..done + fitting.count().max(1)];
        losses.extend(on_pool(|| score_pass(model, pass))?);
        done += pass.len();
        progress(done, windows.len());
    }
    Ok(summary(model, &losses, windows))
}

/// Of the scored tokens of one context.
pub(crate) fn losses(
    model: &Model,
    tokens: &[u32],
    scored: Range<usize>,
) -> candle_core::Result<Vec<f64>> {
    let window = Window { tokens, scored, bytes: 0 };
    on_pool(|| score_pass(model, &[window]))
}

fn score_pass(model: &Model, windows: &[Window<'_>]) -> candle_core::Result<Vec<f64>> {
    let (mut tokens, mut positions, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
    let (mut rows, mut targets) = (Vec::new(), Vec::new());
    for window in windows {
        let start = tokens.len();
        tokens.extend_from_slice(window.tokens);
        positions.extend(0..window.tokens.len() as u32);
        sequences.push(start..tokens.len());
        rows.extend(window.scored.clone().map(|position| (start + position - 1) as u32));
        targets.extend_from_slice(&window.tokens[window.scored.clone()]);
    }
    let heads = model.heads();
    let hidden =
        model.hidden(Phase::Prefill, &tokens, &positions, &mut |_, query, key, value| {
            causal_attention(&heads, query, key, value, &sequences)
        })?;
    let rows = hidden.index_select(&Tensor::new(rows.as_slice(), &model.device)?, 0)?;
    let head = model.weights.output();
    Scored { hidden: &rows, head, targets: &targets }.negative_log_likelihoods()
}

fn summary(model: &Model, losses: &[f64], windows: &[Window<'_>]) -> Perplexity {
    let count = losses.len() as f64;
    let total: f64 = losses.iter().sum();
    let squares: f64 = losses.iter().map(|loss| loss * loss).sum();
    let bytes: usize = windows.iter().map(|window| window.bytes).sum();
    let mean_nll = total / count;
    let variance = (squares / count - mean_nll * mean_nll).max(0.0);
    let perplexity = mean_nll.exp();
    Perplexity {
        perplexity,
        stderr: perplexity * (variance / (count - 1.0).max(1.0)).sqrt(),
        mean_nll,
        bits_per_byte: total / std::f64::consts::LN_2 / bytes.max(1) as f64,
        tokens: losses.len(),
        chunks: windows.len(),
        engine: model.engine(),
    }
}
