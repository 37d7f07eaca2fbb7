//! The measuring process: one text, one set of figures, then it is gone.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use engine::{Document, Perplexity};
use runtime::Inbox;

use crate::{
    calls::{Done, Format, Measure, Measured},
    figures::Meter,
};

/// What to measure, on which text, and how.
#[derive(Debug, Clone)]
pub struct Source {
    pub base: PathBuf,
    pub adapter: Option<PathBuf>,
    pub text: PathBuf,
    pub format: Format,
    pub n_ctx: usize,
    /// 0: disjoint chunks, as llama-perplexity has them.
    pub stride: usize,
    /// 0: all of them.
    pub chunks: usize,
}

/// Answers one call and ends.
pub fn work(device: &str) {
    let inbox: Inbox<Measure> = Inbox::open();
    let Some(call) = inbox.next() else { return };
    let meter = Meter::start();
    let Measure { base, adapter, text, format, n_ctx, stride, chunks } = call.request;
    let [n_ctx, stride, chunks] = [n_ctx, stride, chunks].map(|n| n as usize);
    let source = Source { base, adapter, text, format, n_ctx, stride, chunks };
    let progress = |done: usize, total: usize| {
        call.respond.progress(&Done { chunks: count(done), total: count(total) });
    };
    match measure(&source, device, progress) {
        Ok(figures) => call.respond.reply(&Measured {
            mean_nll: figures.mean_nll,
            perplexity: figures.perplexity,
            stderr: figures.stderr,
            bits_per_byte: figures.bits_per_byte,
            tokens: figures.tokens as u64,
            chunks: count(figures.chunks),
            engine: figures.engine,
            process: meter.read(),
        }),
        Err(error) => call.respond.error(&format!("{error:#}")),
    }
}

/// Measures in this process. `progress` hears chunks done, and of how many.
///
/// # Errors
/// When a file cannot be read or used, or the text is too short for the protocol.
pub fn measure(
    source: &Source,
    device: &str,
    progress: impl FnMut(usize, usize),
) -> anyhow::Result<Perplexity> {
    let (model, tokenizer) = engine::load(&source.base, source.adapter.as_deref(), device)?;
    let text = read(&source.text)?;
    let figures = match (source.format, source.stride) {
        (Format::Documents, _) => {
            let documents = documents(&source.text, text.as_bytes(), source.chunks)?;
            engine::documents(&model, &tokenizer, &documents, progress)?
        }
        (Format::Text, 0) => {
            let limit = (source.chunks > 0).then_some(source.chunks);
            engine::chunks(&model, &tokenizer, &text, source.n_ctx, limit, progress)?
        }
        (Format::Text, stride) => {
            engine::sliding(&model, &tokenizer, &text, source.n_ctx, stride, progress)?
        }
    };
    if !figures.perplexity.is_finite() {
        bail!("the perplexity is {}: the model's weights are broken", figures.perplexity);
    }
    Ok(figures)
}

fn read(path: &Path) -> anyhow::Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
    String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8 text", path.display()))
}

fn documents(path: &Path, text: &[u8], limit: usize) -> anyhow::Result<Vec<Document>> {
    let examples = wire::Example::parse_all(text)
        .with_context(|| format!("read the documents of {}", path.display()))?;
    let limit = if limit == 0 { usize::MAX } else { limit };
    let documents = examples
        .into_iter()
        .take(limit)
        .map(|wire::Example { prompt, completion }| Document { prompt, completion });
    Ok(documents.collect())
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
