//! Measurement with llama.cpp: the base from the cache of converted models, the adapter converted
//! for each measurement, and `llama-perplexity` as a child process.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use engine::{ChunkLayout, ModelTokenizer};
use formats::{ConversionDtype, ModelOutline, is_gguf};
use llama::{CachedGguf, ChunkSelection, GgufCache, PerplexityRequest};

use crate::{
    LlamaCppEvaluator, device_check,
    measurement::{MeasurementInput, PerplexityResult, digest_tokenizer},
};

/// Progress of a measurement.
pub enum MeasureStep<'a> {
    /// A description of a step other than a chunk.
    Note(&'a str),
    /// The chunks done, and their total.
    Chunks(usize, usize),
}

/// Measures a perplexity with llama.cpp. `base_key` is the digest that identifies the base. On a
/// GPU, the device is first compared with the CPU.
///
/// # Errors
/// When a file cannot be read, used or converted, llama.cpp fails, or it computes wrong logits on
/// this host.
pub fn measure_perplexity(
    source: &MeasurementInput,
    base_key: &str,
    llama: &LlamaCppEvaluator,
    progress: &mut dyn FnMut(MeasureStep<'_>),
) -> anyhow::Result<PerplexityResult> {
    if source.protocol_name() != "llama" {
        bail!(
            "llama-perplexity does not support the {} protocol: use candle, or a text and no \
             stride (E110)",
            source.protocol_name()
        );
    }
    let cache = GgufCache::open(&llama.gguf_cache, llama.gguf_cache_bytes)?;
    let scratch =
        tempfile::tempdir_in(cache.scratch_directory()).context("create a scratch directory")?;
    let text = PreparedText::prepare_text(source, scratch.path())?;
    let base = GgufBase::prepare_base(source, base_key, llama, &cache, progress)?;
    let adapter = convert_adapter(source, llama, &cache, scratch.path(), progress)?;
    let canary = match llama.perplexity.device {
        Some(_) => {
            Some(compare_with_cpu(source, base_key, llama, &base, &text, scratch.path(), progress)?)
        }
        None => None,
    };
    let request = PerplexityRequest {
        base: &base.path,
        adapter: adapter.as_deref(),
        text: &text.path,
        n_ctx: source.n_ctx,
        chunks: text.select_chunks(source),
        exact: base.is_exact,
    };
    let needed = text.layout.as_ref().map(|layout| layout.chunks).or(source.chunk_limit());
    let mut chunks = |done: usize, total: usize| {
        // Chunks that are computed after the needed ones are not reported.
        let total = needed.map_or(total, |needed| needed.min(total));
        progress(MeasureStep::Chunks(done.min(total), total));
    };
    let scored = llama.perplexity.measure_perplexity(&request, &mut chunks)?;
    let bits = |layout: &ChunkLayout| {
        scored.mean_nll * scored.tokens as f64
            / (std::f64::consts::LN_2 * layout.bytes.max(1) as f64)
    };
    let figures = PerplexityResult {
        perplexity: scored.perplexity,
        stderr: scored.stderr,
        mean_nll: scored.mean_nll,
        bits_per_byte: text.layout.as_ref().map(bits),
        tokens: scored.tokens,
        chunks: scored.chunks,
        engine: llama.describe_engine(&source.base),
        protocol: source.protocol_name(),
        tokenizer: text.layout.as_ref().map(|_| digest_tokenizer(&source.base)).transpose()?,
        canary,
    };
    figures.check_finite()
}

/// The base as a GGUF file, which is not evicted while this lives.
struct GgufBase {
    path: PathBuf,
    is_exact: bool,
    _in_use: Option<CachedGguf>,
}

impl GgufBase {
    fn prepare_base(
        source: &MeasurementInput,
        key: &str,
        llama: &LlamaCppEvaluator,
        cache: &GgufCache,
        progress: &mut dyn FnMut(MeasureStep<'_>),
    ) -> anyhow::Result<Self> {
        if is_gguf(&source.base) {
            return Ok(Self { path: source.base.clone(), is_exact: false, _in_use: None });
        }
        let mut converting = |done: u64, total: u64| {
            let share = done.saturating_mul(100).checked_div(total).unwrap_or(0);
            progress(MeasureStep::Note(&format!("converting the base for llama.cpp: {share} %")));
        };
        let (dtype, converters) = (llama.dtype, llama.converters.as_ref());
        let cached = cache.get_or_convert(key, &source.base, dtype, converters, &mut converting)?;
        let path = cached.file_path().to_owned();
        Ok(Self { path, is_exact: llama.dtype == ConversionDtype::F32, _in_use: Some(cached) })
    }
}

fn compare_with_cpu(
    source: &MeasurementInput,
    base_key: &str,
    llama: &LlamaCppEvaluator,
    base: &GgufBase,
    text: &PreparedText,
    scratch: &Path,
    progress: &mut dyn FnMut(MeasureStep<'_>),
) -> anyhow::Result<f64> {
    let mut alive = |_, _| progress(MeasureStep::Note("comparing the device with the CPU"));
    let (short, n_ctx, chunks) = text.prepare_check_text(source, scratch)?;
    let request = PerplexityRequest {
        base: &base.path,
        adapter: None,
        text: &short,
        n_ctx,
        chunks,
        exact: base.is_exact,
    };
    device_check::check_device(llama, &device_check_key(source, base_key)?, &request, &mut alive)
}

fn convert_adapter(
    source: &MeasurementInput,
    llama: &LlamaCppEvaluator,
    cache: &GgufCache,
    scratch: &Path,
    progress: &mut dyn FnMut(MeasureStep<'_>),
) -> anyhow::Result<Option<PathBuf>> {
    let Some(adapter) = &source.adapter else { return Ok(None) };
    if is_gguf(adapter) {
        return Ok(Some(adapter.clone()));
    }
    if is_gguf(&source.base) {
        bail!(
            "{} is a GGUF file, so the adapter must be one too: convert {} with `flotilla convert \
             lora` (M111)",
            source.base.display(),
            adapter.display()
        );
    }
    let converted = scratch.join("adapter.gguf");
    let mut on_heartbeat = || progress(MeasureStep::Note("converting the adapter for llama.cpp"));
    let converters = llama.converters.as_ref();
    cache.convert_adapter(&source.base, adapter, &converted, converters, &mut on_heartbeat)?;
    Ok(Some(converted))
}

/// Returns the key under which the result of a device check is remembered. For a full model it is
/// the digest of the configuration, because its weights change with each checkpoint while the
/// device's errors do not.
fn device_check_key(source: &MeasurementInput, base_key: &str) -> anyhow::Result<String> {
    if source.adapter.is_some() || is_gguf(&source.base) {
        return Ok(base_key.to_owned());
    }
    let path = source.base.join("config.json");
    let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    Ok(wire::Digest::hash_bytes(&bytes).to_string())
}

/// The text in the form that `llama-perplexity` receives.
struct PreparedText {
    path: PathBuf,
    /// `None` for a GGUF model, whose tokenizer only llama.cpp can read.
    layout: Option<ChunkLayout>,
    tokenizer: Option<(ModelTokenizer, ModelOutline)>,
}

impl PreparedText {
    fn prepare_text(source: &MeasurementInput, scratch: &Path) -> anyhow::Result<Self> {
        if is_gguf(&source.base) {
            return Ok(Self { path: source.text.clone(), layout: None, tokenizer: None });
        }
        let tokenizer = ModelTokenizer::load_tokenizer(&source.base)?;
        let outline = ModelOutline::from_dir(&source.base)?;
        let text = source.read_text()?;
        let layout =
            engine::layout_chunks(&tokenizer, &outline, &text, source.n_ctx, source.chunk_limit())?;
        let path = scratch.join("text");
        write_text(&path, &layout.text)?;
        Ok(Self { path, layout: Some(layout), tokenizer: Some((tokenizer, outline)) })
    }

    fn select_chunks(&self, source: &MeasurementInput) -> ChunkSelection {
        match (&self.layout, source.chunk_limit()) {
            (Some(layout), _) if layout.has_extra_chunk => {
                ChunkSelection::AllButLast(layout.chunks)
            }
            (Some(layout), _) => ChunkSelection::First(layout.chunks),
            (None, Some(limit)) => ChunkSelection::First(limit),
            (None, None) => ChunkSelection::All,
        }
    }

    /// Writes the text of the device check: two chunks of the text, of at most 512 tokens each.
    fn prepare_check_text(
        &self,
        source: &MeasurementInput,
        scratch: &Path,
    ) -> anyhow::Result<(PathBuf, usize, ChunkSelection)> {
        let n_ctx = source.n_ctx.min(512);
        let Some((tokenizer, outline)) = &self.tokenizer else {
            return Ok((self.path.clone(), n_ctx, ChunkSelection::First(2)));
        };
        let layout =
            engine::layout_chunks(tokenizer, outline, &source.read_text()?, n_ctx, Some(2))?;
        let path = scratch.join("canary");
        write_text(&path, &layout.text)?;
        let all_but_one = ChunkSelection::AllButLast(layout.chunks);
        let chunks = if layout.has_extra_chunk { all_but_one } else { ChunkSelection::First(2) };
        Ok((path, n_ctx, chunks))
    }
}

fn write_text(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}
