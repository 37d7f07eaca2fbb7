//! A model in memory, and its Hugging Face directory.

pub(crate) mod forward;
pub(crate) mod weights;

use crate::adapter::{Adapter, AdapterError};
use crate::config::{Config, ConfigError};
use crate::ops::{attention::Heads, matmul};
use crate::random::Random;
use crate::tensors::{self, TensorFileError};
use candle_core::{Device, Tensor};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use weights::{Kind, Parameter, Weights};

/// Cloning shares the weights.
#[derive(Debug, Clone)]
pub struct Model {
    pub(crate) config: Config,
    pub(crate) weights: Weights,
    pub(crate) device: Device,
    source: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("could not use the model's configuration")]
    Config(#[from] ConfigError),
    #[error(
        "device `{name}` is not available: use cpu, or cuda[:N] or metal[:N] in a build with that feature"
    )]
    Device { name: String, source: Option<candle_core::Error> },
    #[error("could not read or write {path}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{path} does not list the weight files; download it again")]
    Index { path: PathBuf, source: Option<serde_json::Error> },
    #[error("could not use the model's weights")]
    Weights(#[from] TensorFileError),
    #[error("tensor operation failed on the model")]
    Tensor(#[from] candle_core::Error),
}

/// `cpu`, `cuda`, `cuda:1`, `metal`, …
pub fn parse_device(name: &str) -> Result<Device, ModelError> {
    let (kind, index) = name.split_once(':').unwrap_or((name, "0"));
    let unavailable = |source| ModelError::Device { name: name.into(), source };
    let index = index.parse().map_err(|_| unavailable(None))?;
    match kind {
        "cpu" => Ok(Device::Cpu),
        "cuda" => Device::new_cuda(index).map_err(|error| unavailable(Some(error))),
        "metal" => Device::new_metal(index).map_err(|error| unavailable(Some(error))),
        _ => Err(unavailable(None)),
    }
}

impl Model {
    /// Reads `config.json` and `model.safetensors` (or its shards); bf16 and f16 become f32.
    pub fn load(dir: &Path, device: &Device) -> Result<Self, ModelError> {
        let config = Config::load(dir)?;
        let mut found = BTreeMap::new();
        for file in weight_files(dir)? {
            found.append(&mut tensors::read(&file)?);
        }
        let path = dir.join(SINGLE_FILE);
        let weights = Weights::build(&config, |parameter| {
            let Parameter { name, shape, .. } = parameter;
            let tensor = tensors::take(&mut found, &path, name, &shape)?;
            Ok::<_, TensorFileError>(tensor.to_device(device)?)
        })?;
        Ok(Self { config, weights, device: device.clone(), source: Some(dir.into()) })
    }

    /// Random weights: normal with `initializer_range`, biases zero, norms one. Each tensor has
    /// its own random stream, named after it.
    pub fn init(config: Config, seed: u64, device: &Device) -> Result<Self, ModelError> {
        let deviation = config.initializer_range;
        let weights = Weights::build(&config, |Parameter { name, shape, kind }| {
            let count: usize = shape.iter().product();
            let values: Vec<f32> = match kind {
                Kind::Norm => vec![1.0; count],
                Kind::Bias => vec![0.0; count],
                Kind::Matrix => {
                    let mut random = Random::of_part(seed, &name);
                    (0..count).map(|_| (random.normal() * deviation) as f32).collect()
                }
            };
            Tensor::from_vec(values, shape, device)
        })?;
        Ok(Self { config, weights, device: device.clone(), source: None })
    }

    /// A new model in the shape a directory describes; its tokenizer goes where it is saved.
    pub fn init_from(dir: &Path, seed: u64, device: &Device) -> Result<Self, ModelError> {
        let model = Self::init(Config::load(dir)?, seed, device)?;
        Ok(Self { source: Some(dir.into()), ..model })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn parameter_count(&self) -> usize {
        self.weights.named().iter().map(|(_, tensor)| tensor.elem_count()).sum()
    }

    pub(crate) fn heads(&self) -> Heads {
        let Config { heads, kv_heads, head_dim, .. } = self.config;
        Heads { count: heads, kv_count: kv_heads, dim: head_dim }
    }

    /// The same model with the adapter merged in; the receiver is left as it is.
    pub fn with_adapter(&self, adapter: &Adapter) -> Result<Self, AdapterError> {
        adapter.check_fits(&self.config)?;
        let mut merged = self.clone();
        for ((layer, module), pair) in &adapter.pairs {
            let (a, b) = (pair.a.to_device(&self.device)?, pair.b.to_device(&self.device)?);
            let scaled = (b * pair.scale)?;
            let weight = &mut merged.weights.layers[*layer].linears[*module as usize].weight;
            *weight = (&*weight + matmul::product(&scaled, &a)?)?;
        }
        Ok(merged)
    }

    /// Writes `model.safetensors` (f32) and `config.json`, and copies the tokenizer's files from
    /// the directory the model was loaded from, if it was.
    pub fn save(&self, dir: &Path) -> Result<(), ModelError> {
        let file = |path: &Path| {
            let path = path.to_owned();
            move |source| ModelError::File { path, source }
        };
        std::fs::create_dir_all(dir).map_err(file(dir))?;
        tensors::write(&dir.join(SINGLE_FILE), self.weights.named())?;
        let path = dir.join("config.json");
        let text = format!("{:#}\n", self.config.to_json());
        std::fs::write(&path, text).map_err(file(&path))?;
        let Some(source) = self.source.as_deref().filter(|source| *source != dir) else {
            return Ok(());
        };
        for name in SIDE_FILES {
            let from = source.join(name);
            if from.exists() {
                std::fs::copy(&from, dir.join(name)).map_err(file(&from))?;
            }
        }
        Ok(())
    }

    /// Where the model came from, if from a directory.
    pub fn source(&self) -> Option<&Path> {
        self.source.as_deref()
    }
}

const SINGLE_FILE: &str = "model.safetensors";
const SIDE_FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// The single file, or the shards `model.safetensors.index.json` names.
fn weight_files(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let path = dir.join("model.safetensors.index.json");
    if !path.exists() {
        return Ok(vec![dir.join(SINGLE_FILE)]);
    }
    let text = std::fs::read_to_string(&path)
        .map_err(|source| ModelError::File { path: path.clone(), source })?;
    let index: Value = serde_json::from_str(&text)
        .map_err(|source| ModelError::Index { path: path.clone(), source: Some(source) })?;
    let map = index.get("weight_map").and_then(Value::as_object);
    let names = map.map(|map| map.values().filter_map(Value::as_str).collect::<BTreeSet<_>>());
    let plain = |name: &&str| Path::new(name).file_name() == Some(name.as_ref());
    match names {
        Some(names) if !names.is_empty() && names.iter().all(plain) => {
            Ok(names.into_iter().map(|name| dir.join(name)).collect())
        }
        _ => Err(ModelError::Index { path, source: None }),
    }
}
