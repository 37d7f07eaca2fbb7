//! Measuring with llama.cpp: the base from the shelf, the adapter converted for the occasion,
//! `llama-perplexity` as a child.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use engine::{Config, Layout, Tokenizer};
use formats::{convert, is_gguf};
use llama::{Chunks, Environment, Installation, Perplexity, Request, Shelf, Shelved};
use serde::{Deserialize, Serialize};

use crate::{
    canary,
    source::{Figures, Source, tokenizer_digest},
};

/// How this box measures with llama.cpp.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LlamaCpp {
    pub perplexity: Perplexity,
    /// As it calls itself.
    pub version: String,
    pub dtype: Dtype,
    /// Directory of converted models, and what it may take.
    pub shelf: PathBuf,
    pub shelf_bytes: u64,
    /// File of canaries that passed.
    pub canaries: PathBuf,
}

/// Of the converted base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    Q8_0,
}

impl Dtype {
    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
        }
    }
}

impl From<Dtype> for convert::Dtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::Bf16,
            Dtype::Q8_0 => Self::Q8_0,
        }
    }
}

impl From<hardware::Dtype> for Dtype {
    fn from(dtype: hardware::Dtype) -> Self {
        match dtype {
            hardware::Dtype::F32 => Self::F32,
            hardware::Dtype::F16 => Self::F16,
            hardware::Dtype::Bf16 => Self::Bf16,
        }
    }
}

/// What is being done, in words, or chunks done and of how many.
pub enum Step<'a> {
    Note(&'a str),
    Chunks(usize, usize),
}

impl LlamaCpp {
    /// The llama.cpp of a directory (or the one that is found), as a hardware profile wants it.
    ///
    /// # Errors
    /// When there is none that runs, or it has no device that the profile names.
    pub fn find(
        directory: Option<&Path>,
        profile: &hardware::Profile,
        places: Places,
        limits: Limits,
    ) -> anyhow::Result<Self> {
        let installation = Installation::find(directory)?;
        let environment = Environment::new(&profile.variables(), &profile.unset);
        let program = installation.perplexity();
        let wanted = &profile.llama.evaluate;
        let perplexity = Perplexity {
            options: Installation::options(&program, &environment)?,
            device: Installation::device(&program, &wanted.devices, &environment)?,
            program,
            environment,
            mmap: profile.llama.mmap,
            threads: limits.threads,
            silence: limits.silence,
            repeat: limits.repeat_log,
        };
        Ok(Self {
            perplexity,
            version: installation.version,
            dtype: wanted.dtype.into(),
            shelf: places.shelf,
            shelf_bytes: limits.shelf_bytes,
            canaries: places.canaries,
        })
    }

    /// For records: version, device, type of the base.
    pub fn engine(&self, base: &Path) -> String {
        let device = self.perplexity.device.as_deref().unwrap_or("CPU");
        let dtype = if is_gguf(base) { "as the file has it" } else { self.dtype.name() };
        format!("llama.cpp {} {device} {dtype}", self.version)
    }
}

/// Where things are kept on a box.
#[derive(Debug, Clone)]
pub struct Places {
    pub shelf: PathBuf,
    pub canaries: PathBuf,
}

/// What a measurement may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub threads: usize,
    pub silence: std::time::Duration,
    pub shelf_bytes: u64,
    /// Repeat llama.cpp's log on our stderr.
    pub repeat_log: bool,
}

/// Measures. `base_key` is a digest that the base is known by.
///
/// # Errors
/// When a file cannot be read, used or converted, llama.cpp fails, or it computes wrongly here.
pub fn measure(
    source: &Source,
    base_key: &str,
    llama: &LlamaCpp,
    progress: &mut dyn FnMut(Step<'_>),
) -> anyhow::Result<Figures> {
    if source.protocol() != "llama" {
        bail!(
            "llama-perplexity knows no {} protocol: use candle, or a text and no stride (E110)",
            source.protocol()
        );
    }
    let shelf = Shelf::open(&llama.shelf, llama.shelf_bytes)?;
    let scratch = tempfile::tempdir_in(shelf.scratch()).context("create a scratch directory")?;
    let text = Text::prepare(source, scratch.path())?;
    let base = Base::prepare(source, base_key, llama, &shelf, progress)?;
    let adapter = adapter(source, scratch.path())?;
    let canary = match llama.perplexity.device {
        Some(_) => Some(compare(source, base_key, llama, &base, &text, scratch.path(), progress)?),
        None => None,
    };
    let request = Request {
        base: &base.path,
        adapter: adapter.as_deref(),
        text: &text.path,
        n_ctx: source.n_ctx,
        chunks: text.chunks(source),
        exact: base.is_exact,
    };
    let counted = text.layout.as_ref().map(|layout| layout.chunks);
    let mut chunks = |done: usize, total: usize| {
        // The one more chunk does not count.
        let total = counted.unwrap_or(total);
        progress(Step::Chunks(done.min(total), total));
    };
    let scored = llama.perplexity.measure(&request, &mut chunks)?;
    let bits = |layout: &Layout| {
        scored.mean_nll * scored.tokens as f64
            / (std::f64::consts::LN_2 * layout.bytes.max(1) as f64)
    };
    let figures = Figures {
        perplexity: scored.perplexity,
        stderr: scored.stderr,
        mean_nll: scored.mean_nll,
        bits_per_byte: text.layout.as_ref().map(bits),
        tokens: scored.tokens,
        chunks: scored.chunks,
        engine: llama.engine(&source.base),
        protocol: source.protocol(),
        tokenizer: text.layout.as_ref().map(|_| tokenizer_digest(&source.base)).transpose()?,
        canary,
    };
    figures.checked()
}

/// The base as a GGUF file, kept where it is while it is used.
struct Base {
    path: PathBuf,
    is_exact: bool,
    _in_use: Option<Shelved>,
}

impl Base {
    fn prepare(
        source: &Source,
        key: &str,
        llama: &LlamaCpp,
        shelf: &Shelf,
        progress: &mut dyn FnMut(Step<'_>),
    ) -> anyhow::Result<Self> {
        if is_gguf(&source.base) {
            return Ok(Self { path: source.base.clone(), is_exact: false, _in_use: None });
        }
        let mut converting = |done: u64, total: u64| {
            let share = done.saturating_mul(100).checked_div(total).unwrap_or(0);
            progress(Step::Note(&format!("converting the base for llama.cpp: {share} %")));
        };
        let shelved = shelf.model(key, &source.base, llama.dtype.into(), &mut converting)?;
        let path = shelved.path().to_owned();
        Ok(Self { path, is_exact: llama.dtype == Dtype::F32, _in_use: Some(shelved) })
    }
}

/// The canary's ratio for this base.
fn compare(
    source: &Source,
    base_key: &str,
    llama: &LlamaCpp,
    base: &Base,
    text: &Text,
    scratch: &Path,
    progress: &mut dyn FnMut(Step<'_>),
) -> anyhow::Result<f64> {
    let mut alive = |_, _| progress(Step::Note("comparing the device with the CPU"));
    let (short, n_ctx, chunks) = text.canary(source, scratch)?;
    let request = Request {
        base: &base.path,
        adapter: None,
        text: &short,
        n_ctx,
        chunks,
        exact: base.is_exact,
    };
    canary::ratio(llama, &canary_key(source, base_key)?, &request, &mut alive)
}

/// The adapter as llama.cpp reads it.
fn adapter(source: &Source, scratch: &Path) -> anyhow::Result<Option<PathBuf>> {
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
    convert::lora(&source.base, adapter, &converted, convert::Dtype::F32)
        .with_context(|| format!("convert the adapter {} for llama.cpp", adapter.display()))?;
    Ok(Some(converted))
}

/// A full model's weights are new with each checkpoint; what its device computes wrongly is not.
fn canary_key(source: &Source, base_key: &str) -> anyhow::Result<String> {
    if source.adapter.is_some() || is_gguf(&source.base) {
        return Ok(base_key.to_owned());
    }
    let path = source.base.join("config.json");
    let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    Ok(wire::Digest::of(&bytes).to_string())
}

/// The text as it is handed over.
struct Text {
    path: PathBuf,
    /// `None` for a GGUF model, whose tokenizer only llama.cpp can read.
    layout: Option<Layout>,
    tokenizer: Option<(Tokenizer, Config)>,
}

impl Text {
    fn prepare(source: &Source, scratch: &Path) -> anyhow::Result<Self> {
        if is_gguf(&source.base) {
            return Ok(Self { path: source.text.clone(), layout: None, tokenizer: None });
        }
        let tokenizer = Tokenizer::load(&source.base)?;
        let config = Config::load(&source.base)?;
        let text = source.read_text()?;
        let layout = engine::layout(&tokenizer, &config, &text, source.n_ctx, source.limit())?;
        let path = scratch.join("text");
        write(&path, &layout.text)?;
        Ok(Self { path, layout: Some(layout), tokenizer: Some((tokenizer, config)) })
    }

    fn chunks(&self, source: &Source) -> Chunks {
        match (&self.layout, source.limit()) {
            (Some(layout), _) if layout.has_one_more => Chunks::AllButOne(layout.chunks),
            (Some(layout), _) => Chunks::First(layout.chunks),
            (None, Some(limit)) => Chunks::First(limit),
            (None, None) => Chunks::All,
        }
    }

    /// Two chunks of it, of no more than 512 tokens.
    fn canary(&self, source: &Source, scratch: &Path) -> anyhow::Result<(PathBuf, usize, Chunks)> {
        let n_ctx = source.n_ctx.min(512);
        let Some((tokenizer, config)) = &self.tokenizer else {
            return Ok((self.path.clone(), n_ctx, Chunks::First(2)));
        };
        let layout = engine::layout(tokenizer, config, &source.read_text()?, n_ctx, Some(2))?;
        let path = scratch.join("canary");
        write(&path, &layout.text)?;
        let all_but_one = Chunks::AllButOne(layout.chunks);
        let chunks = if layout.has_one_more { all_but_one } else { Chunks::First(2) };
        Ok((path, n_ctx, chunks))
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}
