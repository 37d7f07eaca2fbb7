//! The engine with which an agent serves models, and how its process is started.

use std::{collections::BTreeMap, path::Path, time::Duration};

use agent::WorkerLauncher;
use anyhow::Context;
use completion_server::CompletionServerConfig;
use generator::{GeneratorLimits, GeneratorPaths, LlamaCppGenerator};
use llama::{ProcessEnvironment, ServerProgram};

/// The engine that the user asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServingEngineChoice {
    /// llama.cpp if it is found, otherwise the embedded engine.
    Auto,
    /// The embedded engine.
    Candle,
    LlamaCpp,
}

/// The engine of an agent that serves models.
#[derive(Debug, Clone)]
pub enum ServingEngine {
    LlamaCpp(Box<LlamaCppGenerator>),
    Embedded(Box<EmbeddedServer>),
}

/// The settings with which this host serves models with the embedded engine, in a worker process.
#[derive(Debug, Clone)]
pub struct EmbeddedServer {
    launch: WorkerLauncher,
}

impl ServingEngine {
    /// Selects the engine of a host. A directory of llama.cpp that was given must have it.
    ///
    /// # Errors
    /// llama.cpp is asked for, and not found.
    pub fn select_engine(
        choice: ServingEngineChoice,
        llama_cpp: Option<&Path>,
        launch: &WorkerLauncher,
        places: GeneratorPaths,
    ) -> anyhow::Result<Self> {
        let embedded = || Self::Embedded(Box::new(EmbeddedServer { launch: launch.clone() }));
        if choice == ServingEngineChoice::Candle {
            return Ok(embedded());
        }
        let limits = GeneratorLimits::from_launcher(launch);
        let found =
            LlamaCppGenerator::find_installation(llama_cpp, &launch.profile, limits, places);
        let engine = match found {
            Ok(llama) => Self::LlamaCpp(Box::new(llama)),
            Err(error) if choice == ServingEngineChoice::Auto && llama_cpp.is_none() => {
                tracing::info!(reason = format!("{error:#}"), "serving without llama.cpp");
                embedded()
            }
            Err(error) => {
                return Err(error).context(
                    "could not use llama.cpp to serve models; install it, or pass --server-engine \
                     candle",
                );
            }
        };
        Ok(engine)
    }

    /// Returns true if it answers with the log-probabilities of a prompt.
    pub(crate) fn echoes_prompts(&self) -> bool {
        matches!(self, Self::Embedded(_))
    }
}

impl EmbeddedServer {
    /// Returns the time limit for loading the models.
    pub(crate) fn ready_limit(&self) -> Duration {
        GeneratorLimits::from_launcher(&self.launch).ready_limit
    }

    /// Returns the command that serves models.
    ///
    /// # Errors
    /// A path is not UTF-8.
    pub(crate) fn server_program(
        &self,
        config: &CompletionServerConfig,
    ) -> anyhow::Result<ServerProgram> {
        let config = serde_json::to_string(config).context("name the models")?;
        let arguments = ["--models".into(), config.into()];
        let command = self.launch.worker_command("serve", "serve", arguments);
        let text =
            |(name, value): (String, std::ffi::OsString)| Some((name, value.into_string().ok()?));
        let variables: BTreeMap<String, String> =
            command.build_environment().into_iter().filter_map(text).collect();
        Ok(ServerProgram {
            name: "the embedded engine's server",
            program: command.program,
            arguments: command.arguments,
            environment: ProcessEnvironment::new(&variables, &command.unset),
            on_device: self.launch.device != "cpu",
        })
    }
}
