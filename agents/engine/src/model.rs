//! A model in memory, and its Hugging Face directory.

pub(crate) mod forward;
mod gguf;
mod memory;
pub(crate) mod weights;

use crate::adapter::{Adapter, AdapterError};
use crate::ops::{attention::Heads, matmul, matrix::Matrix, rope};
use crate::random::Random;
use crate::tensors::{self, TensorFile, TensorFileError};
use candle_core::{DType, Device, Tensor};
use formats::{
    Config, ConfigError, DirError, GgufModelError, SIDE_FILES, SINGLE_FILE, weight_files,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use weights::{Kind, Parameter, Source, Weights};

/// What a model's matrices are held as. All else, and every sum, is f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dtype {
    #[default]
    F32,
    Bf16,
}

impl Dtype {
    pub const NAMES: [&str; 2] = ["f32", "bf16"];

    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::Bf16].into_iter().find(|dtype| dtype.name() == name)
    }

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    fn of(self, kind: Kind) -> DType {
        match (self, kind) {
            (Self::Bf16, Kind::Matrix) => DType::BF16,
            (Self::Bf16, Kind::Bias | Kind::Norm) | (Self::F32, _) => DType::F32,
        }
    }
}

/// Cloning shares the weights.
#[derive(Debug, Clone)]
pub struct Model {
    pub(crate) config: Config,
    pub(crate) weights: Weights,
    /// Computed apart: in bf16 a weight would lose what little an adapter adds to it.
    pub(crate) beside: Option<Arc<Adapter>>,
    pub(crate) device: Device,
    pub(crate) dtype: Dtype,
    frequencies: Vec<f32>,
    source: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("could not use the model's configuration")]
    Config(#[from] ConfigError),
    #[error(
        "device `{name}` is not available: use cpu, or cuda[:N] or metal[:N] in a build with that feature (M109)"
    )]
    Device { name: String, source: Option<candle_core::Error> },
    #[error("could not read or write {path}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("could not find the model's weights")]
    Dir(#[from] DirError),
    #[error("could not use the model")]
    Gguf(#[from] GgufModelError),
    #[error("could not use the model's weights")]
    Weights(#[from] TensorFileError),
    #[error(
        "the model that config.json describes has {parameters} parameters, {needed_gib} GiB as {dtype}, and {available_gib} GiB of memory are available; take a smaller model, bf16 or a larger box (M108)"
    )]
    TooLarge { parameters: u128, needed_gib: u128, available_gib: u128, dtype: &'static str },
    #[error("a bf16 model is not saved with an adapter beside it; merge the two as files (M113)")]
    Beside,
    #[error("tensor operation failed on the model (X101)")]
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

/// The weights of a directory, by name.
struct Files<'a> {
    dir: &'a Path,
    places: BTreeMap<String, &'a TensorFile>,
    dtype: Dtype,
    device: &'a Device,
}

impl Files<'_> {
    fn file(&self, name: &str) -> Result<&TensorFile, TensorFileError> {
        let missing =
            || TensorFileError::Missing { path: self.dir.join(SINGLE_FILE), name: name.into() };
        self.places.get(name).copied().ok_or_else(missing)
    }
}

impl Source for Files<'_> {
    type Error = TensorFileError;

    fn vector(&mut self, parameter: Parameter) -> Result<Tensor, TensorFileError> {
        let Parameter { name, shape, kind } = parameter;
        self.file(&name)?.read(&name, Some(&shape), self.dtype.of(kind), self.device)
    }

    /// Mapped, if the file has it as it is held.
    fn matrix(&mut self, parameter: Parameter) -> Result<Matrix, TensorFileError> {
        let mapped = match self.dtype {
            Dtype::Bf16 if self.device.is_cpu() => {
                self.file(&parameter.name)?.map(&parameter.name, &parameter.shape)?
            }
            _ => None,
        };
        match mapped {
            Some(mapped) => Ok(Matrix::Mapped(mapped)),
            None => Ok(self.vector(parameter)?.into()),
        }
    }
}

impl Model {
    /// Reads `config.json` and `model.safetensors` (or its shards), of f32, bf16 or f16, as f32.
    pub fn load(dir: &Path, device: &Device) -> Result<Self, ModelError> {
        Self::load_as(dir, device, Dtype::F32)
    }

    /// A directory, or a GGUF file. A tensor at a time: beside the model itself no more than a block of a file is in memory.
    pub fn load_as(dir: &Path, device: &Device, dtype: Dtype) -> Result<Self, ModelError> {
        if dir.is_file() {
            return Self::load_gguf(dir, device, dtype);
        }
        let config = Config::load(dir)?;
        memory::check(&config, dtype, device)?;
        let files = weight_files(dir)?;
        let files = files.iter().map(|path| TensorFile::open(path));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let mut places = BTreeMap::new();
        for file in &files {
            places.extend(file.names().into_iter().map(|name| (name, file)));
        }
        let weights = Weights::build(&config, Files { dir, places, dtype, device })?;
        Ok(Self { source: Some(dir.into()), ..Self::of(config, weights, device, dtype) })
    }

    fn of(config: Config, weights: Weights, device: &Device, dtype: Dtype) -> Self {
        let frequencies = rope::frequencies(&config);
        let device = device.clone();
        Self { config, weights, beside: None, device, dtype, frequencies, source: None }
    }

    /// Random weights: normal with `initializer_range`, biases zero, norms one. Each tensor has
    /// its own random stream, named after it.
    pub fn init(config: Config, seed: u64, device: &Device) -> Result<Self, ModelError> {
        memory::check(&config, Dtype::F32, device)?;
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
        Ok(Self::of(config, weights, device, Dtype::F32))
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
        self.weights.named().iter().map(|(_, matrix)| matrix.count()).sum()
    }

    /// Of its matrices.
    pub(crate) fn precision(&self) -> DType {
        self.dtype.of(Kind::Matrix)
    }

    pub(crate) fn heads(&self) -> Heads {
        let Config { heads, kv_heads, head_dim, .. } = self.config;
        Heads { count: heads, kv_count: kv_heads, dim: head_dim }
    }

    /// The same model with the adapter; the receiver is left as it is.
    pub fn with_adapter(&self, adapter: &Adapter) -> Result<Self, AdapterError> {
        self.clone().adapted(adapter)
    }

    /// With the adapter merged in, which for the weights of an f32 model that nobody else has
    /// takes no more memory, or in bf16 beside it.
    pub fn adapted(mut self, adapter: &Adapter) -> Result<Self, AdapterError> {
        adapter.check_fits(&self.config)?;
        if self.dtype == Dtype::Bf16 {
            if self.beside.is_some() {
                return Err(AdapterError::Second);
            }
            self.beside = Some(Arc::new(adapter.to_device(&self.device)?.cast(self.precision())?));
            return Ok(self);
        }
        for ((layer, module), pair) in &adapter.pairs {
            let (a, b) = (pair.a.to_device(&self.device)?, pair.b.to_device(&self.device)?);
            let scaled = (b * pair.scale)?;
            let weight = &mut self.weights.layers[*layer].linears[*module as usize].weight;
            *weight = (weight.tensor()? + matmul::product(&scaled, &a)?)?.into();
        }
        Ok(self)
    }

    /// What produced a figure: the engine, and how it held the weights if not as f32.
    pub fn engine(&self) -> String {
        match self.dtype {
            Dtype::F32 => crate::ENGINE.to_owned(),
            Dtype::Bf16 => format!("{}-bf16", crate::ENGINE),
        }
    }

    /// Writes `model.safetensors` and `config.json`, and copies the tokenizer's files from
    /// the directory the model was loaded from, if it was.
    pub fn save(&self, dir: &Path) -> Result<(), ModelError> {
        let file = |path: &Path| {
            let path = path.to_owned();
            move |source| ModelError::File { path, source }
        };
        if self.beside.is_some() {
            return Err(ModelError::Beside);
        }
        std::fs::create_dir_all(dir).map_err(file(dir))?;
        tensors::write(&dir.join(SINGLE_FILE), self.weights.tensors()?)?;
        let path = dir.join("config.json");
        let mut config = self.config.to_json();
        if self.dtype == Dtype::Bf16 {
            for field in ["dtype", "torch_dtype"] {
                config[field] = "bfloat16".into();
            }
        }
        let text = format!("{config:#}\n");
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
