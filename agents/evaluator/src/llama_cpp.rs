//! The settings with which a host measures with llama.cpp.

use std::path::{Path, PathBuf};

use formats::{ConversionDtype, is_gguf};
use llama::{LlamaConverters, LlamaInstallation, PerplexityRunner, ProcessEnvironment};
use serde::{Deserialize, Serialize};

/// The llama.cpp installation of a host, and the settings with which it measures.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LlamaCppEvaluator {
    /// The command, device and limits of `llama-perplexity`.
    pub perplexity: PerplexityRunner,
    pub version: String,
    pub dtype: ConversionDtype,
    pub gguf_cache: PathBuf,
    pub gguf_cache_bytes: u64,
    /// For models that are not converted natively.
    #[serde(default)]
    pub converters: Option<LlamaConverters>,
    /// The file of device checks that passed.
    pub device_checks: PathBuf,
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
            gguf_cache: places.gguf_cache,
            gguf_cache_bytes: limits.gguf_cache_bytes,
            converters: None,
            device_checks: places.device_checks,
        })
    }

    /// Describes the engine for records: version, device and weight type of the base.
    pub fn describe_engine(&self, base: &Path) -> String {
        let device = self.perplexity.device.as_deref().unwrap_or("CPU");
        let dtype = if is_gguf(base) { "as the file has it" } else { self.dtype.name() };
        format!("llama.cpp {} {device} {dtype}", self.version)
    }
}

/// The paths that an evaluator uses on a host.
#[derive(Debug, Clone)]
pub struct EvaluatorPaths {
    pub gguf_cache: PathBuf,
    /// The file of device checks that passed.
    pub device_checks: PathBuf,
}

/// The limits of a measurement.
#[derive(Debug, Clone, Copy)]
pub struct EvaluatorLimits {
    /// The threads of `llama-perplexity`.
    pub threads: usize,
    /// The time without output after which the child counts as hung.
    pub silence_limit: std::time::Duration,
    pub gguf_cache_bytes: u64,
    /// True to copy the log of llama.cpp to stderr.
    pub repeat_log: bool,
}
