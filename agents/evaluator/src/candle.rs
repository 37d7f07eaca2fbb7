//! Measuring with the embedded engine, which knows every protocol.

use std::path::Path;

use anyhow::bail;
use engine::Dtype;
use formats::is_gguf;

use crate::{
    Format,
    source::{Figures, Source, tokenizer_digest},
};

/// Measures in this process. `progress` hears chunks done, and of how many.
///
/// # Errors
/// When a file cannot be read or used, or the text is too short for the protocol.
pub fn measure(
    source: &Source,
    device: &str,
    dtype: Dtype,
    progress: impl FnMut(usize, usize),
) -> anyhow::Result<Figures> {
    let (model, tokenizer) = engine::load(&source.base, source.adapter.as_deref(), device, dtype)?;
    let text = source.read_text()?;
    let figures = match (source.format, source.stride) {
        (Format::Documents, _) => {
            let documents = source.documents(&text)?;
            engine::documents(&model, &tokenizer, &documents, progress)?
        }
        (Format::Text, 0) => {
            engine::chunks(&model, &tokenizer, &text, source.n_ctx, source.limit(), progress)?
        }
        (Format::Text, stride) => {
            engine::sliding(&model, &tokenizer, &text, source.n_ctx, stride, progress)?
        }
    };
    let figures = Figures {
        perplexity: figures.perplexity,
        stderr: figures.stderr,
        mean_nll: figures.mean_nll,
        bits_per_byte: Some(figures.bits_per_byte),
        tokens: figures.tokens,
        chunks: figures.chunks,
        engine: figures.engine,
        protocol: source.protocol(),
        // A file has its tokenizer in its own words.
        tokenizer: if is_gguf(&source.base) { None } else { Some(tokenizer_digest(&source.base)?) },
        canary: None,
    };
    figures.checked()
}

/// Whether a model is likely to fit beside what the box runs: its weights may become f32.
///
/// # Errors
/// When it is not.
pub(crate) fn check_fits(source: &Source) -> anyhow::Result<()> {
    let Some(available) = available_bytes(Path::new("/proc/meminfo")) else { return Ok(()) };
    let files = formats::weight_files(&source.base)?;
    let sizes = files.iter().filter_map(|path| path.metadata().ok()).map(|data| data.len());
    let needed = 2 * sizes.sum::<u64>();
    if needed > available {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        bail!(
            "llama-perplexity knows no {} protocol, and for candle the model may take {:.1} GiB of \
             the {:.1} GiB that are available; give the suite `stride: 0` and a text, or have it \
             measured on a box with more memory (E110)",
            source.protocol(),
            gib(needed),
            gib(available)
        );
    }
    Ok(())
}

fn available_bytes(meminfo: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(meminfo).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}
