//! The choice of the engine that an evaluator measures with.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use agent::WorkerLauncher;
use llama::LlamaConverters;

use crate::llama_cpp::{EvaluatorLimits, EvaluatorPaths, LlamaCppEvaluator};

/// The engine that the user asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvaluatorEngineChoice {
    /// The engine that suits the host's hardware profile.
    Auto,
    /// The embedded engine.
    Candle,
    LlamaCpp,
}

/// The engine that the evaluator uses.
#[derive(Debug, Clone)]
pub enum EvaluatorBackend {
    /// The embedded engine.
    Candle,
    /// llama.cpp for the protocol that it has; candle for the others.
    LlamaCpp(Box<LlamaCppEvaluator>),
}

/// A process that finishes no chunk for this long is hung.
pub(crate) const CHUNK_TIMEOUT: Duration = Duration::from_secs(900);

/// The lower bound of the adaptive timeout, however quick earlier chunks were.
pub(crate) const CHUNK_TIMEOUT_MIN: Duration = Duration::from_secs(60);

impl EvaluatorBackend {
    /// Selects the engine. `directory` is the location of llama.cpp, if known, and `converters` are
    /// for models that are not converted natively; converted models are cached in `gguf_cache`, up
    /// to `gguf_cache_bytes`.
    ///
    /// # Errors
    /// When llama.cpp is asked for, or the host's GPU needs it, and no installation runs on that
    /// GPU.
    pub fn select_backend(
        choice: EvaluatorEngineChoice,
        (directory, converters): (Option<&Path>, Option<LlamaConverters>),
        launch: &WorkerLauncher,
        gguf_cache: PathBuf,
        gguf_cache_bytes: u64,
    ) -> anyhow::Result<Self> {
        let llama_cpp = match choice {
            EvaluatorEngineChoice::Auto => !launch.profile.is_cpu(),
            EvaluatorEngineChoice::Candle => false,
            EvaluatorEngineChoice::LlamaCpp => true,
        };
        if !llama_cpp {
            return Ok(Self::Candle);
        }
        let places =
            EvaluatorPaths { gguf_cache, device_checks: launch.directory.join("canaries.json") };
        let limits = EvaluatorLimits {
            threads: launch.threads,
            silence_limit: launch.silence_limit.unwrap_or(CHUNK_TIMEOUT).min(CHUNK_TIMEOUT),
            gguf_cache_bytes,
            repeat_log: true,
        };
        let found =
            LlamaCppEvaluator::find_installation(directory, &launch.profile, places, limits)?;
        tracing::info!(
            version = found.version,
            device = found.perplexity.device.as_deref().unwrap_or("CPU"),
            "perplexities are measured by llama.cpp"
        );
        Ok(Self::LlamaCpp(Box::new(LlamaCppEvaluator { converters, ..found })))
    }

    /// Returns true if the engine measures models outside of the table of architectures.
    pub(crate) fn takes_any_model(&self) -> bool {
        matches!(self, Self::LlamaCpp(llama) if llama.converters.is_some())
    }

    pub(crate) fn describe_engine(&self) -> String {
        match self {
            Self::Candle => engine::ENGINE.to_owned(),
            Self::LlamaCpp(llama) => llama.describe_engine(Path::new("")),
        }
    }
}
