//! What is measured, and what comes of it, whichever engine measures.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use engine::Document;
use wire::Digest;

use crate::Format;

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

/// What was measured, and all that figures must share to be compared.
#[derive(Debug, Clone, PartialEq)]
pub struct Figures {
    pub perplexity: f64,
    /// Standard error of `perplexity`.
    pub stderr: f64,
    /// Nats a token.
    pub mean_nll: f64,
    /// `None` where there is no tokenizer to count the bytes with.
    pub bits_per_byte: Option<f64>,
    /// Scored ones.
    pub tokens: usize,
    pub chunks: usize,
    pub engine: String,
    pub protocol: &'static str,
    /// Of `tokenizer.json`.
    pub tokenizer: Option<Digest>,
    /// Perplexity on the device against that on the CPU; `None` on the CPU.
    pub canary: Option<f64>,
}

impl Source {
    /// How figures of it come about, in one word.
    pub fn protocol(&self) -> &'static str {
        match (self.format, self.stride) {
            (Format::Documents, _) => "documents",
            (Format::Text, 0) => "llama",
            (Format::Text, _) => "sliding",
        }
    }

    /// At most so many chunks.
    pub(crate) fn limit(&self) -> Option<usize> {
        (self.chunks > 0).then_some(self.chunks)
    }

    pub(crate) fn read_text(&self) -> anyhow::Result<String> {
        let path = &self.text;
        let bytes = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
        String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8 text", path.display()))
    }

    pub(crate) fn documents(&self, text: &str) -> anyhow::Result<Vec<Document>> {
        let examples = wire::Example::parse_all(text.as_bytes())
            .with_context(|| format!("read the documents of {}", self.text.display()))?;
        let documents = examples
            .into_iter()
            .take(self.limit().unwrap_or(usize::MAX))
            .map(|wire::Example { prompt, completion }| Document { prompt, completion });
        Ok(documents.collect())
    }
}

impl Figures {
    pub(crate) fn checked(self) -> anyhow::Result<Self> {
        if !self.perplexity.is_finite() {
            bail!("the perplexity is {}: the model's weights are broken (E106)", self.perplexity);
        }
        Ok(self)
    }
}

/// Of a model directory's tokenizer.
pub(crate) fn tokenizer_digest(base: &Path) -> anyhow::Result<Digest> {
    let path = base.join("tokenizer.json");
    let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    Ok(Digest::of(&bytes))
}
