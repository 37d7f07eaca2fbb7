use std::path::PathBuf;

use crate::gguf::GgufError;
use crate::peft::AdapterSettingsError;
use crate::safetensors::SafetensorsError;
use crate::{ModelConfigError, ModelDirError};

/// The reason why a conversion failed.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    #[error("could not use the model's configuration")]
    Config(#[from] ModelConfigError),
    #[error("could not find the model's weights")]
    Dir(#[from] ModelDirError),
    #[error("could not use the adapter's settings")]
    Settings(#[from] AdapterSettingsError),
    #[error("could not use the tensors")]
    Tensors(#[from] SafetensorsError),
    #[error("could not use the GGUF file")]
    Gguf(#[from] GgufError),
    #[error("could not read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("could not write {path}")]
    Write { path: PathBuf, source: std::io::Error },
    #[error("{path} is not valid JSON (F106)")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{path}: tensor `{name}` {what} (M107)")]
    Adapter { path: PathBuf, name: String, what: String },
    #[error(
        "an adapter is written as f32, f16 or bf16, not q8_0: it is small, and B's rows too short (M111)"
    )]
    Q8Adapter,
    #[error(
        "{dir}: tensor `{name}` matches no tensor of a {architecture} model; check that \
         config.json belongs to this model (M106)"
    )]
    UnknownTensor { dir: PathBuf, name: String, architecture: &'static str },
    #[error("{path} already exists and is not empty; name a new or empty directory (M111)")]
    Exists { path: PathBuf },
    #[error(
        "{path} cannot be shown; name a GGUF or safetensors file, a model directory or a PEFT \
         adapter directory (M111)"
    )]
    Unknown { path: PathBuf },
    #[error("{path}: {what} (M110)")]
    Tokenizer { path: PathBuf, what: String },
}
