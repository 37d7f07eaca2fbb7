//! The choice of the engine that a generator draws samples with.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use agent::WorkerLauncher;
use anyhow::{Context, bail};
use formats::FloatDtype;
use hardware::HardwareProfile;
use llama::{LlamaConverters, LlamaInstallation, LlamaServerSettings, ProcessEnvironment};
use serde::{Deserialize, Serialize};

/// For reading the weights, however slow the disk.
const READY_TIMEOUT: Duration = Duration::from_secs(900);

/// The engine that the user asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GeneratorEngineChoice {
    /// The engine that suits the host's hardware profile.
    Auto,
    /// The embedded engine.
    Candle,
    LlamaCpp,
    /// The URL of a running OpenAI-compatible server.
    Url(String),
}

/// The engine that the generator uses, as its worker receives it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GeneratorBackend {
    Candle,
    LlamaCpp(Box<LlamaCppGenerator>),
    Endpoint(OpenAiEndpoint),
}

/// The settings with which this host generates with llama.cpp.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LlamaCppGenerator {
    /// The command, device and options of `llama-server`.
    pub server: LlamaServerSettings,
    pub version: String,
    pub dtype: FloatDtype,
    pub gguf_cache: PathBuf,
    pub gguf_cache_bytes: u64,
    /// For models that are not converted natively.
    #[serde(default)]
    pub converters: Option<LlamaConverters>,
    /// The worker's own directory: the server's socket and key, and the converted adapter.
    pub directory: PathBuf,
    /// The time after which a server that is not ready counts as hung.
    pub ready_limit: Duration,
}

/// An OpenAI-compatible server that this agent does not run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenAiEndpoint {
    /// Includes `/v1`.
    pub url: String,
    /// The model's name on the server; `None` for the only one.
    pub model: Option<String>,
    /// The file that contains the server's key.
    pub key_file: Option<PathBuf>,
}

/// The host's resources that a worker may use.
#[derive(Debug, Clone, Copy)]
pub struct GeneratorLimits {
    pub threads: usize,
    /// The time limit for reading the weights, however slow the disk.
    pub ready_limit: Duration,
}

impl GeneratorLimits {
    /// Derives the limits from the settings of all workers.
    pub fn from_launcher(launch: &WorkerLauncher) -> Self {
        Self {
            threads: launch.threads,
            ready_limit: launch.silence_limit.unwrap_or(READY_TIMEOUT).min(READY_TIMEOUT),
        }
    }
}

/// The user's options about the engine.
#[derive(Debug, Clone, Copy)]
pub struct GeneratorEngineOptions<'a> {
    pub choice: &'a GeneratorEngineChoice,
    pub llama_cpp: Option<&'a Path>,
    /// The model's name on an external server.
    pub endpoint_model: Option<&'a str>,
    /// The file that contains an external server's key.
    pub endpoint_key_file: Option<&'a Path>,
}

/// The paths that an agent's generator uses.
#[derive(Debug, Clone)]
pub struct GeneratorPaths {
    pub gguf_cache: PathBuf,
    pub gguf_cache_bytes: u64,
    /// llama.cpp's own converters, if this box has them.
    pub converters: Option<LlamaConverters>,
    /// The worker's own directory.
    pub directory: PathBuf,
}

impl FromStr for GeneratorEngineChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "candle" => Ok(Self::Candle),
            "llama.cpp" => Ok(Self::LlamaCpp),
            url if url.starts_with("http://") || url.starts_with("https://") => {
                parse_endpoint_url(url)
            }
            _ => Err("write auto, candle, llama.cpp, or an OpenAI-compatible server's URL, such \
                      as http://127.0.0.1:8000/v1"
                .into()),
        }
    }
}

/// The URL must have no credentials, query or fragment: it appears in facts.
fn parse_endpoint_url(text: &str) -> Result<GeneratorEngineChoice, String> {
    let url = reqwest::Url::parse(text).map_err(|error| format!("not a URL: {error}"))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(
            "must not contain credentials, because facts record the URL; put the key into a \
                    file (--endpoint-key-file)"
                .into(),
        );
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("must end with its path, such as /v1".into());
    }
    Ok(GeneratorEngineChoice::Url(url.as_str().trim_end_matches('/').to_owned()))
}

impl GeneratorBackend {
    /// Selects the engine for a host with this hardware profile.
    ///
    /// # Errors
    /// When llama.cpp is asked for, or the host's GPU needs it, and no installation runs on that
    /// GPU; or when endpoint options are given without an endpoint's URL.
    pub fn select_backend(
        wanted: &GeneratorEngineOptions<'_>,
        profile: &HardwareProfile,
        limits: GeneratorLimits,
        places: GeneratorPaths,
    ) -> anyhow::Result<Self> {
        let GeneratorEngineOptions { choice, llama_cpp, endpoint_model, endpoint_key_file } =
            *wanted;
        if !matches!(choice, GeneratorEngineChoice::Url(_))
            && (endpoint_model.is_some() || endpoint_key_file.is_some())
        {
            bail!(
                "--endpoint-model and --endpoint-key-file need an endpoint's URL as \
                 --generator-engine (A102)"
            );
        }
        match choice {
            GeneratorEngineChoice::Url(url) => Ok(Self::Endpoint(OpenAiEndpoint {
                url: url.clone(),
                model: endpoint_model.map(str::to_owned),
                key_file: endpoint_key_file.map(std::path::absolute).transpose()?,
            })),
            GeneratorEngineChoice::Auto if profile.is_cpu() => Ok(Self::Candle),
            GeneratorEngineChoice::Candle => Ok(Self::Candle),
            GeneratorEngineChoice::Auto | GeneratorEngineChoice::LlamaCpp => {
                let found =
                    LlamaCppGenerator::find_installation(llama_cpp, profile, limits, places);
                let found = found.context(
                    "could not use llama.cpp to generate samples; install it, or choose the engine \
                     candle",
                )?;
                tracing::info!(
                    engine = found.describe_engine(),
                    "samples are generated by llama.cpp"
                );
                Ok(Self::LlamaCpp(Box::new(found)))
            }
        }
    }

    /// Describes the engine for users and for records.
    pub fn describe_engine(&self) -> String {
        match self {
            Self::Candle => engine::ENGINE.to_owned(),
            Self::LlamaCpp(llama) => llama.describe_engine(),
            Self::Endpoint(endpoint) => endpoint.describe_endpoint(),
        }
    }

    /// Returns true if the loaded weights are verified by their digests, and not only claimed by a
    /// server.
    pub fn has_verified_weights(&self) -> bool {
        !matches!(self, Self::Endpoint(_))
    }

    /// Returns true if the engine runs models outside of the table of architectures.
    pub(crate) fn takes_any_model(&self) -> bool {
        match self {
            Self::Candle => false,
            Self::LlamaCpp(llama) => llama.converters.is_some(),
            Self::Endpoint(_) => true,
        }
    }

    /// Returns true if the engine continues given tokens and reports those that it draws.
    pub(crate) fn draws_episodes(&self) -> bool {
        !matches!(self, Self::Endpoint(_))
    }

    /// Returns true if a running worker of this engine can load another adapter.
    pub(crate) fn can_swap_adapter(&self) -> bool {
        matches!(self, Self::Candle | Self::LlamaCpp(_))
    }
}

impl LlamaCppGenerator {
    /// Finds llama.cpp in a directory, or searches for it, and selects the device and weight type
    /// of the hardware profile.
    ///
    /// # Errors
    /// When no installation runs, or it has no device that the profile names.
    pub fn find_installation(
        directory: Option<&Path>,
        profile: &HardwareProfile,
        limits: GeneratorLimits,
        places: GeneratorPaths,
    ) -> anyhow::Result<Self> {
        let installation = LlamaInstallation::find_installation(directory)?;
        let environment = ProcessEnvironment::new(&profile.child_variables(), &profile.unset);
        let (program, wanted) = (installation.server_path(), &profile.llama.generate);
        let server = LlamaServerSettings {
            options: LlamaInstallation::read_options(&program, &environment)?,
            device: LlamaInstallation::select_device(&program, &wanted.devices, &environment)?,
            program,
            environment,
            mmap: profile.llama.mmap,
            threads: limits.threads,
        };
        Ok(Self {
            server,
            version: installation.version,
            dtype: wanted.dtype,
            gguf_cache: places.gguf_cache,
            gguf_cache_bytes: places.gguf_cache_bytes,
            converters: places.converters,
            directory: places.directory,
            ready_limit: limits.ready_limit,
        })
    }

    /// Describes the engine: version, device and weight type of the base.
    pub fn describe_engine(&self) -> String {
        let device = self.server.device.as_deref().unwrap_or("CPU");
        format!("llama.cpp {} {device} {}", self.version, self.dtype.name())
    }
}

impl OpenAiEndpoint {
    /// Describes the server: its model, its URL, and that the policy is unverified.
    pub(crate) fn describe_endpoint(&self) -> String {
        let model = self.model.as_deref().unwrap_or("its model");
        format!("openai {model} at {} (policy unverified)", self.url)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_named_or_given_by_url() {
        assert_eq!("candle".parse(), Ok(GeneratorEngineChoice::Candle));
        let url = |text: &str| text.parse::<GeneratorEngineChoice>();
        assert_eq!(
            url("http://box:8000/v1/"),
            Ok(GeneratorEngineChoice::Url("http://box:8000/v1".into()))
        );
        for wrong in ["vllm", "box:8000", "http://", "http://me:secret@box/v1", "http://box/?a=1"] {
            assert!(url(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_host_without_a_gpu_needs_no_llama_cpp() {
        let cpu = HardwareProfile::load_named("cpu").unwrap();
        let places = GeneratorPaths {
            gguf_cache: "s".into(),
            gguf_cache_bytes: 1,
            converters: None,
            directory: "d".into(),
        };
        let choose = |choice: &GeneratorEngineChoice, profile: &HardwareProfile| {
            let llama_cpp = Some(Path::new("/nonexistent"));
            let wanted = GeneratorEngineOptions {
                choice,
                llama_cpp,
                endpoint_model: None,
                endpoint_key_file: None,
            };
            let limits = GeneratorLimits { threads: 1, ready_limit: READY_TIMEOUT };
            GeneratorBackend::select_backend(&wanted, profile, limits, places.clone())
        };
        assert!(matches!(choose(&GeneratorEngineChoice::Auto, &cpu), Ok(GeneratorBackend::Candle)));
        let gpu = HardwareProfile::load_named("gfx1151").unwrap();
        for (choice, profile) in
            [(GeneratorEngineChoice::LlamaCpp, &cpu), (GeneratorEngineChoice::Auto, &gpu)]
        {
            let error = format!("{:#}", choose(&choice, profile).unwrap_err());
            assert!(error.contains("--llama-cpp") && error.contains("candle"), "{error}");
        }
    }
}
