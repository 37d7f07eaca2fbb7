//! Measurement with the embedded engine, which has every protocol.

use anyhow::bail;
use engine::MatrixDtype;
use formats::is_gguf;

use crate::{
    TextFormat,
    measurement::{MeasurementInput, PerplexityResult, digest_tokenizer},
};

/// Measures a perplexity in this process with the embedded engine. `progress` receives the chunks
/// done and their total.
pub fn measure_perplexity(
    source: &MeasurementInput,
    device: &str,
    dtype: MatrixDtype,
    progress: impl FnMut(usize, usize),
) -> anyhow::Result<PerplexityResult> {
    let (model, tokenizer) =
        engine::load_model(&source.base, source.adapter.as_deref(), device, dtype)?;
    let text = source.read_text()?;
    let figures = match (source.format, source.stride) {
        (TextFormat::Documents, _) => {
            let documents = source.parse_documents(&text)?;
            engine::score_documents(&model, &tokenizer, &documents, progress)?
        }
        (TextFormat::Text, 0) => engine::score_chunks(
            &model,
            &tokenizer,
            &text,
            source.n_ctx,
            source.chunk_limit(),
            progress,
        )?,
        (TextFormat::Text, stride) => {
            engine::score_sliding(&model, &tokenizer, &text, source.n_ctx, stride, progress)?
        }
    };
    let figures = PerplexityResult {
        perplexity: figures.perplexity,
        stderr: figures.stderr,
        mean_nll: figures.mean_nll,
        bits_per_byte: Some(figures.bits_per_byte),
        tokens: figures.tokens,
        chunks: figures.chunks,
        engine: figures.engine,
        protocol: source.protocol_name(),
        // A GGUF file has its own form of tokenizer.
        tokenizer: if is_gguf(&source.base) { None } else { Some(digest_tokenizer(&source.base)?) },
        canary: None,
    };
    figures.check_finite()
}

/// Checks that twice the size of the model's files fits into the available memory, because weights
/// may be converted to f32. Succeeds if the available memory is unknown.
pub(crate) fn check_memory(source: &MeasurementInput) -> anyhow::Result<()> {
    let Some(available) = hardware::available_memory_bytes() else { return Ok(()) };
    let files = formats::list_weight_files(&source.base)?;
    let sizes = files.iter().filter_map(|path| path.metadata().ok()).map(|data| data.len());
    let needed = 2 * sizes.sum::<u64>();
    if needed > available {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        bail!(
            "llama-perplexity does not support the {} protocol, and for candle the model may take \
             {:.1} GiB of the {:.1} GiB that are available; give the suite `stride: 0` and a text, \
             or have it measured on a box with more memory (E110)",
            source.protocol_name(),
            gib(needed),
            gib(available)
        );
    }
    Ok(())
}
