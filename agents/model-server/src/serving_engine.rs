//! The engine with which an agent serves models, and how its process is started.

use std::{collections::BTreeMap, path::Path, str::FromStr, time::Duration};

use agent::WorkerLauncher;
use anyhow::Context;
use completion_server::CompletionServerConfig;
use generator::{GeneratorLimits, GeneratorPaths, LlamaCppGenerator};
use llama::{ProcessEnvironment, ServerProgram};

/// The time after which a process on a GPU hangs if it does nothing. The first prompt may compile
/// kernels for 150 s.
const HANG_LIMIT: Duration = Duration::from_secs(300);
/// The same without a GPU, where one step may compute many long prompts.
const CPU_HANG_LIMIT: Duration = Duration::from_secs(3600);

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

impl FromStr for ServingEngineChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "candle" => Ok(Self::Candle),
            "llama.cpp" => Ok(Self::LlamaCpp),
            _ => Err("write auto, candle or llama.cpp"),
        }
    }
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

    /// Returns the time after which a process that does nothing counts as hung.
    pub(crate) fn hang_limit(&self) -> Duration {
        let uses_gpu = match self {
            Self::LlamaCpp(llama) => llama.server.device.is_some(),
            Self::Embedded(embedded) => embedded.uses_gpu(),
        };
        if uses_gpu { HANG_LIMIT } else { CPU_HANG_LIMIT }
    }

    /// Returns true if the engine can answer with the log-probabilities of a prompt.
    pub(crate) fn echoes_prompts(&self) -> bool {
        matches!(self, Self::Embedded(_))
    }

    /// Returns true if the engine's completions have log-probabilities in OpenAI's form.
    pub(crate) fn writes_token_lists(&self) -> bool {
        matches!(self, Self::Embedded(_))
    }
}

impl EmbeddedServer {
    fn uses_gpu(&self) -> bool {
        self.launch.device != "cpu"
    }

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
            on_device: self.uses_gpu(),
        })
    }
}

#[cfg(test)]
mod tests {
    use agent::ProcessGroups;
    use hardware::HardwareProfile;

    use super::*;

    fn select(choice: &str, llama_cpp: Option<&str>) -> anyhow::Result<ServingEngine> {
        let launch = WorkerLauncher {
            program: "flotilla".into(),
            wrapper: None,
            silence_limit: None,
            threads: 2,
            device: "cpu".into(),
            dtype: "bf16".into(),
            directory: "d".into(),
            profile: HardwareProfile::load_named("cpu").unwrap(),
            root: "/".into(),
            process_groups: ProcessGroups::default(),
        };
        let places = GeneratorPaths {
            gguf_cache: "s".into(),
            gguf_cache_bytes: 1,
            directory: "d".into(),
            converters: None,
        };
        let choice = choice.parse().unwrap();
        ServingEngine::select_engine(choice, llama_cpp.map(Path::new), &launch, places)
    }

    #[test]
    fn the_embedded_engine_is_started_as_a_worker_with_its_models() {
        let ServingEngine::Embedded(server) = select("candle", Some("/nonexistent")).unwrap()
        else {
            panic!("it is asked for");
        };
        let config = CompletionServerConfig {
            base: "/base".into(),
            adapters: vec!["/adapter".into()],
            serves_base: false,
            alias: "m".into(),
            slots: 3,
            context: 512,
        };
        let program = server.server_program(&config).unwrap();
        let arguments: Vec<&str> =
            program.arguments.iter().map(|argument| argument.to_str().unwrap()).collect();
        let fixed = ["worker", "serve", "--device", "cpu", "--dtype", "bf16", "--models"];
        assert_eq!(arguments[..fixed.len()], fixed);
        let read: CompletionServerConfig = serde_json::from_str(arguments[fixed.len()]).unwrap();
        assert_eq!((read.base, read.slots, read.serves_base), (config.base, 3, false));
    }

    #[test]
    fn a_directory_without_llama_cpp_is_an_error_that_names_the_other_engine() {
        for choice in ["auto", "llama.cpp"] {
            let error = format!("{:#}", select(choice, Some("/nonexistent")).unwrap_err());
            assert!(error.contains("--server-engine candle") && error.contains("E101"), "{error}");
        }
        assert!("vllm".parse::<ServingEngineChoice>().is_err());
    }
}
