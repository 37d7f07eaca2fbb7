//! The input and the result of a measurement, independent of the engine.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use engine::ScoredDocument;
use wire::Digest;

use crate::TextFormat;

/// The model, the text and the method of a measurement.
#[derive(Debug, Clone)]
pub struct MeasurementInput {
    /// A directory or GGUF file.
    pub base: PathBuf,
    pub adapter: Option<PathBuf>,
    pub text: PathBuf,
    pub format: TextFormat,
    /// The context length in tokens.
    pub n_ctx: usize,
    /// The tokens between two chunks; 0 for disjoint chunks, as in llama-perplexity.
    pub stride: usize,
    /// 0 for all.
    pub chunks: usize,
}

/// A measured perplexity, with everything that two results must share to be comparable.
#[derive(Debug, Clone, PartialEq)]
pub struct PerplexityResult {
    pub perplexity: f64,
    /// The standard error of `perplexity`.
    pub stderr: f64,
    /// The mean negative log-likelihood, in nats per token.
    pub mean_nll: f64,
    /// `None` without a tokenizer that counts the bytes.
    pub bits_per_byte: Option<f64>,
    pub tokens: usize,
    pub chunks: usize,
    /// The engine, its version, device and weight type.
    pub engine: String,
    /// `llama`, `sliding` or `documents`.
    pub protocol: &'static str,
    pub tokenizer: Option<Digest>,
    /// The perplexity of a short text on the device, divided by that on the CPU; `None` on the CPU.
    pub canary: Option<f64>,
}

impl MeasurementInput {
    /// Returns the name of the protocol: `documents`, `llama` (disjoint chunks) or `sliding` (with
    /// a stride).
    pub(crate) fn protocol_name(&self) -> &'static str {
        match (self.format, self.stride) {
            (TextFormat::Documents, _) => "documents",
            (TextFormat::Text, 0) => "llama",
            (TextFormat::Text, _) => "sliding",
        }
    }

    pub(crate) fn chunk_limit(&self) -> Option<usize> {
        (self.chunks > 0).then_some(self.chunks)
    }

    pub(crate) fn read_text(&self) -> anyhow::Result<String> {
        let path = &self.text;
        let bytes = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
        String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8 text", path.display()))
    }

    pub(crate) fn parse_documents(&self, text: &str) -> anyhow::Result<Vec<ScoredDocument>> {
        let examples = wire::TrainingExample::parse_all(text.as_bytes())
            .with_context(|| format!("read the documents of {}", self.text.display()))?;
        let documents = examples.into_iter().take(self.chunk_limit().unwrap_or(usize::MAX)).map(
            |wire::TrainingExample { prompt, completion, .. }| ScoredDocument {
                prompt,
                completion,
            },
        );
        Ok(documents.collect())
    }
}

impl PerplexityResult {
    /// Fails if the perplexity is not finite because the weights are broken.
    pub(crate) fn check_finite(self) -> anyhow::Result<Self> {
        if !self.perplexity.is_finite() {
            bail!("the perplexity is {}: the model's weights are broken (E106)", self.perplexity);
        }
        Ok(self)
    }
}

pub(crate) fn digest_tokenizer(base: &Path) -> anyhow::Result<Digest> {
    let path = base.join("tokenizer.json");
    let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    Ok(Digest::hash_bytes(&bytes))
}
