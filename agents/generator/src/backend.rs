//! Which engine a generator draws samples with.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use anyhow::{Context, bail};
use formats::convert;
use hardware::{Dtype, Profile};
use llama::{Environment, Installation, ServerSettings};
use runtime::Launch;
use serde::{Deserialize, Serialize};

/// To read the weights, however slow the disk.
const READY_LIMIT: Duration = Duration::from_secs(900);

/// What was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// By the box's hardware profile.
    Auto,
    Candle,
    LlamaCpp,
    /// A running OpenAI-compatible server.
    Url(String),
}

/// What it came to, as the worker is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    Candle,
    LlamaCpp(Box<LlamaCpp>),
    Endpoint(Endpoint),
}

/// How this box generates with llama.cpp.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LlamaCpp {
    pub server: ServerSettings,
    /// As it calls itself.
    pub version: String,
    /// Of the converted base.
    pub dtype: BaseDtype,
    /// Directory of converted models, and what it may take.
    pub shelf: PathBuf,
    pub shelf_bytes: u64,
    /// The worker's own: the server's socket and key, the converted adapter.
    pub directory: PathBuf,
    /// A server that is not ready by then is hung.
    pub ready_limit: Duration,
}

/// Of the converted base's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaseDtype {
    F32,
    F16,
    Bf16,
}

/// A server that somebody else runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Up to and with `/v1`.
    pub url: String,
    /// What it calls the model; without one, the only one it has.
    pub model: Option<String>,
    pub key_file: Option<PathBuf>,
}

/// What a worker may take of the box.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub threads: usize,
    /// However slow its disk, the weights are read by then.
    pub ready: Duration,
}

impl Limits {
    pub fn of(launch: &Launch) -> Self {
        Self {
            threads: launch.threads,
            ready: launch.silence.unwrap_or(READY_LIMIT).min(READY_LIMIT),
        }
    }
}

/// What a user said of the engine.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    pub choice: &'a Choice,
    /// Where llama.cpp is, if that is known.
    pub llama_cpp: Option<&'a Path>,
    pub endpoint_model: Option<&'a str>,
    pub endpoint_key_file: Option<&'a Path>,
}

/// Where an agent's generator keeps things.
#[derive(Debug, Clone)]
pub struct Places {
    pub shelf: PathBuf,
    pub shelf_bytes: u64,
    pub directory: PathBuf,
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "candle" => Ok(Self::Candle),
            "llama.cpp" => Ok(Self::LlamaCpp),
            url if url.starts_with("http://") || url.starts_with("https://") => url_of(url),
            _ => Err("write auto, candle, llama.cpp, or an OpenAI-compatible server's URL, such \
                      as http://127.0.0.1:8000/v1"
                .into()),
        }
    }
}

fn url_of(text: &str) -> Result<Choice, String> {
    let url = reqwest::Url::parse(text).map_err(|error| format!("not a URL: {error}"))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err("facts name it: put its key into a file (--endpoint-key-file)".into());
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("must end with its path, such as /v1".into());
    }
    Ok(Choice::Url(url.as_str().trim_end_matches('/').to_owned()))
}

impl Backend {
    /// What a choice comes to on a box of this profile.
    ///
    /// # Errors
    /// When llama.cpp is asked for, or the box's GPU asks for it, and there is none that runs on
    /// that GPU.
    pub fn choose(
        wanted: &Wanted<'_>,
        profile: &Profile,
        limits: Limits,
        places: Places,
    ) -> anyhow::Result<Self> {
        let Wanted { choice, llama_cpp, endpoint_model, endpoint_key_file } = *wanted;
        if !matches!(choice, Choice::Url(_))
            && (endpoint_model.is_some() || endpoint_key_file.is_some())
        {
            bail!(
                "--endpoint-model and --endpoint-key-file belong to an endpoint's URL as engine (A102)"
            );
        }
        match choice {
            Choice::Url(url) => Ok(Self::Endpoint(Endpoint {
                url: url.clone(),
                model: endpoint_model.map(str::to_owned),
                key_file: endpoint_key_file.map(std::path::absolute).transpose()?,
            })),
            Choice::Auto if profile.is_cpu() => Ok(Self::Candle),
            Choice::Candle => Ok(Self::Candle),
            Choice::Auto | Choice::LlamaCpp => {
                let found = LlamaCpp::find(llama_cpp, profile, limits, places);
                let found = found.context(
                    "samples are to be generated by llama.cpp; candle as the engine does without",
                )?;
                tracing::info!(engine = found.describe(), "samples are generated by llama.cpp");
                Ok(Self::LlamaCpp(Box::new(found)))
            }
        }
    }

    /// For people and for records.
    pub fn describe(&self) -> String {
        match self {
            Self::Candle => engine::ENGINE.to_owned(),
            Self::LlamaCpp(llama) => llama.describe(),
            Self::Endpoint(endpoint) => endpoint.describe(),
        }
    }

    /// Whether what it serves is what an order says: digests were checked, not believed.
    pub fn is_verified(&self) -> bool {
        !matches!(self, Self::Endpoint(_))
    }

    /// Whether a worker of it can be given another adapter.
    pub(crate) fn adopts(&self) -> bool {
        matches!(self, Self::Candle)
    }
}

impl LlamaCpp {
    /// The llama.cpp of a directory (or the one that is found), as a hardware profile wants it.
    ///
    /// # Errors
    /// When there is none that runs, or it has no device that the profile names.
    pub fn find(
        directory: Option<&Path>,
        profile: &Profile,
        limits: Limits,
        places: Places,
    ) -> anyhow::Result<Self> {
        let installation = Installation::find(directory)?;
        let environment = Environment::new(&profile.variables(), &profile.unset);
        let (program, wanted) = (installation.server(), &profile.llama.generate);
        let server = ServerSettings {
            options: Installation::options(&program, &environment)?,
            device: Installation::device(&program, &wanted.devices, &environment)?,
            program,
            environment,
            mmap: profile.llama.mmap,
            threads: limits.threads,
        };
        Ok(Self {
            server,
            version: installation.version,
            dtype: wanted.dtype.into(),
            shelf: places.shelf,
            shelf_bytes: places.shelf_bytes,
            directory: places.directory,
            ready_limit: limits.ready,
        })
    }

    /// Version, device, type of the base.
    pub fn describe(&self) -> String {
        let device = self.server.device.as_deref().unwrap_or("CPU");
        format!("llama.cpp {} {device} {}", self.version, self.dtype.name())
    }
}

impl Endpoint {
    /// Named with what is to be known of it.
    pub fn describe(&self) -> String {
        let model = self.model.as_deref().unwrap_or("its model");
        format!("openai {model} at {} (policy unverified)", self.url)
    }
}

impl BaseDtype {
    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

impl FromStr for BaseDtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::F32, Self::F16, Self::Bf16];
        all.into_iter().find(|one| one.name() == text).ok_or("write f32, f16 or bf16".to_owned())
    }
}

impl From<Dtype> for BaseDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::Bf16,
        }
    }
}

impl From<BaseDtype> for convert::Dtype {
    fn from(dtype: BaseDtype) -> Self {
        match dtype {
            BaseDtype::F32 => Self::F32,
            BaseDtype::F16 => Self::F16,
            BaseDtype::Bf16 => Self::Bf16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_named_or_given_by_url() {
        assert_eq!("candle".parse(), Ok(Choice::Candle));
        let url = |text: &str| text.parse::<Choice>();
        assert_eq!(url("http://box:8000/v1/"), Ok(Choice::Url("http://box:8000/v1".into())));
        for wrong in ["vllm", "box:8000", "http://", "http://me:secret@box/v1", "http://box/?a=1"] {
            assert!(url(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_box_without_a_gpu_needs_no_llama_cpp() {
        let cpu = Profile::named("cpu").unwrap();
        let places = Places { shelf: "s".into(), shelf_bytes: 1, directory: "d".into() };
        let choose = |choice: &Choice, profile: &Profile| {
            let llama_cpp = Some(Path::new("/nonexistent"));
            let wanted =
                Wanted { choice, llama_cpp, endpoint_model: None, endpoint_key_file: None };
            let limits = Limits { threads: 1, ready: READY_LIMIT };
            Backend::choose(&wanted, profile, limits, places.clone())
        };
        assert!(matches!(choose(&Choice::Auto, &cpu), Ok(Backend::Candle)));
        let gpu = Profile::named("gfx1151").unwrap();
        for (choice, profile) in [(Choice::LlamaCpp, &cpu), (Choice::Auto, &gpu)] {
            let error = format!("{:#}", choose(&choice, profile).unwrap_err());
            assert!(error.contains("--llama-cpp") && error.contains("candle"), "{error}");
        }
    }
}
