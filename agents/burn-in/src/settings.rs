//! The settings of a burn-in.

use std::{path::PathBuf, time::Duration};

use agent::WorkerLauncher;
use hardware::host_files::LiveFiles;
use trainer::TrainingEngine;

/// The settings of a burn-in.
#[derive(Debug, Clone)]
pub struct BurnInSettings {
    /// The version of the program, for the report.
    pub version: String,
    /// The launcher of workers; its directory is a scratch directory for all files.
    pub launch: WorkerLauncher,
    /// The host's files, without the environment that trains.
    pub files: LiveFiles,
    /// The engine that trains the adapter, or the reason why this box has none.
    pub engine: Result<TrainingEngine, String>,
    /// A model's directory; `None` for a small model that is trained first.
    pub model: Option<PathBuf>,
    /// The directory of llama.cpp's programs; `None` to search for them.
    pub llama_cpp: Option<PathBuf>,
    /// The cache of converted models, and its size in bytes.
    pub gguf_cache: (PathBuf, u64),
    /// The longest time of one stage.
    pub stage_limit: Duration,
    /// The longest time of all stages; those that it leaves no time for are skipped.
    pub limit: Duration,
    /// The largest mean difference of log-probabilities between GPU and CPU, in nats per token.
    pub tolerance: f64,
}
