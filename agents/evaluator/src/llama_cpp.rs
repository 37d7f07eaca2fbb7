//! Measurement with llama.cpp: the base from the cache of converted models, the adapter converted
//! for each measurement, and `llama-perplexity` as a child process.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use engine::{ChunkLayout, ModelConfig, ModelTokenizer};
use formats::{convert, is_gguf};
use llama::{
    CachedGguf, ChunkSelection, GgufCache, LlamaInstallation, PerplexityRequest, PerplexityRunner,
    ProcessEnvironment,
};
use serde::{Deserialize, Serialize};

use crate::{
    device_canary,
    measurement::{MeasurementInput, PerplexityResult, digest_tokenizer},
};

/// The settings with which this host measures with llama.cpp.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LlamaCppEvaluator {
    /// The command, device and limits of `llama-perplexity`.
    pub perplexity: PerplexityRunner,
    /// The version that the program reports.
    pub version: String,
    /// The weight type of the converted base.
    pub dtype: ConvertedDtype,
    /// The directory of the cache of converted models.
    pub shelf: PathBuf,
    /// The size limit of that cache in bytes.
    pub shelf_bytes: u64,
    /// The file of canaries that passed.
    pub canaries: PathBuf,
}

/// The weight type of the converted base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConvertedDtype {
    F32,
    F16,
    Bf16,
    Q8_0,
}

impl ConvertedDtype {
    /// Returns the name, as in results.
    fn dtype_name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
        }
    }
}

impl From<ConvertedDtype> for convert::ConversionDtype {
    fn from(dtype: ConvertedDtype) -> Self {
        match dtype {
            ConvertedDtype::F32 => Self::F32,
            ConvertedDtype::F16 => Self::F16,
            ConvertedDtype::Bf16 => Self::Bf16,
            ConvertedDtype::Q8_0 => Self::Q8_0,
        }
    }
}

impl From<hardware::ProfileDtype> for ConvertedDtype {
    fn from(dtype: hardware::ProfileDtype) -> Self {
        match dtype {
            hardware::ProfileDtype::F32 => Self::F32,
            hardware::ProfileDtype::F16 => Self::F16,
            hardware::ProfileDtype::Bf16 => Self::Bf16,
        }
    }
}

/// A step of a measurement.
pub enum MeasureStep<'a> {
    /// A description of the current step, which is not a chunk.
    Note(&'a str),
    /// The chunks done, and their total.
    Chunks(usize, usize),
}

impl LlamaCppEvaluator {
    /// Finds llama.cpp in a directory, or searches for it, and selects the device and weight type
    /// of the hardware profile.
    ///
    /// # Errors
    /// When no installation runs, or it has no device that the profile names.
    pub fn find_installation(
        directory: Option<&Path>,
        profile: &hardware::HardwareProfile,
        places: EvaluatorPaths,
        limits: EvaluatorLimits,
    ) -> anyhow::Result<Self> {
        let installation = LlamaInstallation::find_installation(directory)?;
        let environment = ProcessEnvironment::new(&profile.child_variables(), &profile.unset);
        let program = installation.perplexity_path();
        let wanted = &profile.llama.evaluate;
        let perplexity = PerplexityRunner {
            options: LlamaInstallation::read_options(&program, &environment)?,
            device: LlamaInstallation::select_device(&program, &wanted.devices, &environment)?,
            program,
            environment,
            mmap: profile.llama.mmap,
            threads: limits.threads,
            silence: limits.silence_limit,
            repeat: limits.repeat_log,
        };
        Ok(Self {
            perplexity,
            version: installation.version,
            dtype: wanted.dtype.into(),
            shelf: places.gguf_cache,
            shelf_bytes: limits.gguf_cache_bytes,
            canaries: places.canaries,
        })
    }

    /// Describes the engine for records: version, device and weight type of the base.
    pub fn describe_engine(&self, base: &Path) -> String {
        let device = self.perplexity.device.as_deref().unwrap_or("CPU");
        let dtype = if is_gguf(base) { "as the file has it" } else { self.dtype.dtype_name() };
        format!("llama.cpp {} {device} {dtype}", self.version)
    }
}

/// The paths that an evaluator uses on a host.
#[derive(Debug, Clone)]
pub struct EvaluatorPaths {
    /// The directory of the cache of converted models.
    pub gguf_cache: PathBuf,
    /// The file of canaries that passed.
    pub canaries: PathBuf,
}

/// The limits of a measurement.
#[derive(Debug, Clone, Copy)]
pub struct EvaluatorLimits {
    /// The number of threads of `llama-perplexity`.
    pub threads: usize,
    /// The time without output after which the child counts as hung.
    pub silence_limit: std::time::Duration,
    /// The size limit of the cache of converted models.
    pub gguf_cache_bytes: u64,
    /// True to copy the log of llama.cpp to stderr.
    pub repeat_log: bool,
}

/// Measures with llama.cpp. `base_key` is the digest that identifies the base. On a GPU, the device
/// is first compared with the CPU.
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
    let shelf = GgufCache::open(&llama.shelf, llama.shelf_bytes)?;
    let scratch =
        tempfile::tempdir_in(shelf.scratch_directory()).context("create a scratch directory")?;
    let text = PreparedText::prepare_text(source, scratch.path())?;
    let base = GgufBase::prepare_base(source, base_key, llama, &shelf, progress)?;
    let adapter = convert_adapter(source, scratch.path())?;
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
    let counted = text.layout.as_ref().map(|layout| layout.chunks);
    let mut chunks = |done: usize, total: usize| {
        // An added last chunk is not reported.
        let total = counted.unwrap_or(total);
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
    /// Returns the base as a GGUF file, converted if it is in another format.
    fn prepare_base(
        source: &MeasurementInput,
        key: &str,
        llama: &LlamaCppEvaluator,
        shelf: &GgufCache,
        progress: &mut dyn FnMut(MeasureStep<'_>),
    ) -> anyhow::Result<Self> {
        if is_gguf(&source.base) {
            return Ok(Self { path: source.base.clone(), is_exact: false, _in_use: None });
        }
        let mut converting = |done: u64, total: u64| {
            let share = done.saturating_mul(100).checked_div(total).unwrap_or(0);
            progress(MeasureStep::Note(&format!("converting the base for llama.cpp: {share} %")));
        };
        let shelved =
            shelf.get_or_convert(key, &source.base, llama.dtype.into(), &mut converting)?;
        let path = shelved.file_path().to_owned();
        Ok(Self { path, is_exact: llama.dtype == ConvertedDtype::F32, _in_use: Some(shelved) })
    }
}

/// Returns the canary's ratio for this base.
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
    let (short, n_ctx, chunks) = text.prepare_canary(source, scratch)?;
    let request = PerplexityRequest {
        base: &base.path,
        adapter: None,
        text: &short,
        n_ctx,
        chunks,
        exact: base.is_exact,
    };
    device_canary::check_device(llama, &canary_key(source, base_key)?, &request, &mut alive)
}

/// Returns the adapter as a GGUF file, converted if it is in another format.
fn convert_adapter(source: &MeasurementInput, scratch: &Path) -> anyhow::Result<Option<PathBuf>> {
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
    convert::convert_lora(&source.base, adapter, &converted, convert::ConversionDtype::F32)
        .with_context(|| format!("convert the adapter {} for llama.cpp", adapter.display()))?;
    Ok(Some(converted))
}

/// Returns the key under which a canary is remembered. For a full model it is the digest of the
/// configuration, because its weights change with each checkpoint while the device's errors do not.
fn canary_key(source: &MeasurementInput, base_key: &str) -> anyhow::Result<String> {
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
    /// The chunk layout; `None` for a GGUF model, whose tokenizer only llama.cpp can read.
    layout: Option<ChunkLayout>,
    tokenizer: Option<(ModelTokenizer, ModelConfig)>,
}

impl PreparedText {
    /// Reads the text and lays out its chunks for the model's tokenizer.
    fn prepare_text(source: &MeasurementInput, scratch: &Path) -> anyhow::Result<Self> {
        if is_gguf(&source.base) {
            return Ok(Self { path: source.text.clone(), layout: None, tokenizer: None });
        }
        let tokenizer = ModelTokenizer::load_tokenizer(&source.base)?;
        let config = ModelConfig::from_dir(&source.base)?;
        let text = source.read_text()?;
        let layout =
            engine::layout_chunks(&tokenizer, &config, &text, source.n_ctx, source.chunk_limit())?;
        let path = scratch.join("text");
        write_text(&path, &layout.text)?;
        Ok(Self { path, layout: Some(layout), tokenizer: Some((tokenizer, config)) })
    }

    /// Returns the chunks that count.
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

    /// Writes the canary text: two chunks of the text, of at most 512 tokens each. Returns its
    /// path, context length and chunks.
    fn prepare_canary(
        &self,
        source: &MeasurementInput,
        scratch: &Path,
    ) -> anyhow::Result<(PathBuf, usize, ChunkSelection)> {
        let n_ctx = source.n_ctx.min(512);
        let Some((tokenizer, config)) = &self.tokenizer else {
            return Ok((self.path.clone(), n_ctx, ChunkSelection::First(2)));
        };
        let layout =
            engine::layout_chunks(tokenizer, config, &source.read_text()?, n_ctx, Some(2))?;
        let path = scratch.join("canary");
        write_text(&path, &layout.text)?;
        let all_but_one = ChunkSelection::AllButLast(layout.chunks);
        let chunks = if layout.has_extra_chunk { all_but_one } else { ChunkSelection::First(2) };
        Ok((path, n_ctx, chunks))
    }
}

/// Writes a text to a file.
fn write_text(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}
