//! Which engine an evaluator measures with.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use runtime::Launch;

use crate::llama_cpp::{Limits, LlamaCpp, Places};

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// By the box's hardware profile.
    Auto,
    Candle,
    LlamaCpp,
}

/// What it came to.
#[derive(Debug, Clone)]
pub enum Backend {
    Candle,
    /// For what it can measure; candle for the rest.
    LlamaCpp(Box<LlamaCpp>),
}

/// A process that finishes no chunk for so long is hung.
pub(crate) const SILENCE: Duration = Duration::from_secs(900);

impl Backend {
    /// `directory` is where llama.cpp is, if that is known; converted models are kept in `shelf`
    /// up to `shelf_bytes`.
    ///
    /// # Errors
    /// When llama.cpp is asked for, or the box's GPU asks for it, and there is none that runs on
    /// that GPU.
    pub fn choose(
        choice: Choice,
        directory: Option<&Path>,
        launch: &Launch,
        shelf: PathBuf,
        shelf_bytes: u64,
    ) -> anyhow::Result<Self> {
        let llama_cpp = match choice {
            Choice::Auto => !launch.profile.is_cpu(),
            Choice::Candle => false,
            Choice::LlamaCpp => true,
        };
        if !llama_cpp {
            return Ok(Self::Candle);
        }
        let places = Places { shelf, canaries: launch.directory.join("canaries.json") };
        let limits = Limits {
            threads: launch.threads,
            silence: launch.silence.unwrap_or(SILENCE).min(SILENCE),
            shelf_bytes,
            repeat_log: true,
        };
        let found = LlamaCpp::find(directory, &launch.profile, places, limits)?;
        tracing::info!(
            version = found.version,
            device = found.perplexity.device.as_deref().unwrap_or("CPU"),
            "perplexities are measured by llama.cpp"
        );
        Ok(Self::LlamaCpp(Box::new(found)))
    }

    /// For people.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Candle => engine::ENGINE.to_owned(),
            Self::LlamaCpp(llama) => llama.engine(Path::new("")),
        }
    }
}
