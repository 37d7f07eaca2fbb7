//! A model in memory, and its Hugging Face directory.

pub(crate) mod forward;
mod gguf;
mod memory;
pub(crate) mod weights;

use crate::adapter::{AdapterError, LoraAdapter};
use crate::ops::matrix::{MatrixForm, WeightMatrix};
use crate::ops::packed::{MatmulKernel, MatmulPhase};
use crate::ops::{attention::HeadShape, matmul, rope};
use crate::random::RandomStream;
use crate::tensor_file::{self, TensorFile, TensorFileError};
use candle_core::{DType, Device, Tensor};
use formats::{
    GgufModelError, ModelConfig, ModelConfigError, ModelDirError, ModelOutline, SIDE_FILES,
    SINGLE_WEIGHTS_FILE, list_weight_files,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use weights::{DecoderWeights, ModelParameter, ParameterKind, ParameterSource};

/// The element type of a model's matrices. Everything else, and every sum, is f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MatrixDtype {
    #[default]
    F32,
    Bf16,
    /// 8-bit integers, 32 of which share a scale; only on the CPU, and not for training.
    Q8_0,
}

impl MatrixDtype {
    pub const NAMES: [&str; 3] = ["f32", "bf16", "q8_0"];

    /// Parses the name of a type.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::Bf16, Self::Q8_0].into_iter().find(|dtype| dtype.type_name() == name)
    }

    /// Returns the name of the type.
    pub fn type_name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Returns true if a model of this type merges an adapter into its weights.
    pub fn merges_adapters(self) -> bool {
        self == Self::F32
    }

    /// Returns the type of a parameter's tensor; matrices in 8 bits are made from f32.
    fn for_kind(self, kind: ParameterKind) -> DType {
        match (self, kind) {
            (Self::Bf16, ParameterKind::Matrix) => DType::BF16,
            _ => DType::F32,
        }
    }
}

/// A decoder-only language model in memory. A clone shares the weights.
///
/// An f32 model merges an adapter into its weights. Others keep it separate, because their weights
/// would lose most of the adapter's small change.
#[derive(Debug, Clone)]
pub struct LanguageModel {
    pub(crate) config: ModelConfig,
    pub(crate) weights: DecoderWeights,
    /// Not in an f32 model.
    pub(crate) unmerged_adapter: Option<Arc<LoraAdapter>>,
    pub(crate) device: Device,
    pub(crate) dtype: MatrixDtype,
    /// One frequency for each pair of elements.
    frequencies: Vec<f32>,
    source: Option<PathBuf>,
}

/// The reason why a model cannot be loaded, created or saved.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("could not use the model's configuration")]
    Config(#[from] ModelConfigError),
    #[error(
        "device `{name}` is not available: use cpu, or cuda[:N] or metal[:N] in a build with that feature (M109)"
    )]
    Device { name: String, source: Option<candle_core::Error> },
    #[error("could not read or write {path}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("could not find the model's weights")]
    Dir(#[from] ModelDirError),
    #[error("could not use the model")]
    Gguf(#[from] GgufModelError),
    #[error("could not use the model's weights")]
    Weights(#[from] TensorFileError),
    #[error(
        "the model that config.json describes has {parameters} parameters, {needed_gib} GiB as {dtype}, and {available_gib} GiB of memory are available; take a smaller model, bf16 or a larger box (M108)"
    )]
    TooLarge { parameters: u128, needed_gib: u128, available_gib: u128, dtype: &'static str },
    #[error(
        "a {dtype} model is not saved with an adapter beside it; merge the two as files (M113)"
    )]
    UnmergedAdapter { dtype: &'static str },
    #[error("a q8_0 model runs on the CPU only; choose --device cpu or --dtype bf16 (M109)")]
    QuantizedDevice,
    #[error("tensor operation failed on the model (X101)")]
    Tensor(#[from] candle_core::Error),
}

/// Checks that this engine computes the model of a directory. A configuration that cannot be read
/// passes, because the loader reports it.
pub fn check_architecture(dir: &Path) -> Result<(), ModelConfigError> {
    ModelOutline::from_dir(dir).map_or(Ok(()), |outline| outline.require_embedded(dir))
}

/// Parses the name of a device: `cpu`, `cuda`, `cuda:1`, `metal`, …
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

struct DirectoryWeights<'a> {
    dir: &'a Path,
    files_by_name: BTreeMap<String, &'a TensorFile>,
    dtype: MatrixDtype,
    device: &'a Device,
}

impl DirectoryWeights<'_> {
    fn find_file(&self, name: &str) -> Result<&TensorFile, TensorFileError> {
        let missing = || TensorFileError::Missing {
            path: self.dir.join(SINGLE_WEIGHTS_FILE),
            name: name.into(),
        };
        self.files_by_name.get(name).copied().ok_or_else(missing)
    }
}

impl ParameterSource for DirectoryWeights<'_> {
    type Error = TensorFileError;

    fn load_vector(&mut self, parameter: ModelParameter) -> Result<Tensor, TensorFileError> {
        let ModelParameter { name, shape, kind } = parameter;
        self.find_file(&name)?.read_tensor(
            &name,
            Some(&shape),
            self.dtype.for_kind(kind),
            self.device,
        )
    }

    /// Maps the matrix into memory if the file has it in the wanted type.
    fn load_matrix(&mut self, parameter: ModelParameter) -> Result<WeightMatrix, TensorFileError> {
        let mapped = match self.dtype {
            MatrixDtype::Bf16 | MatrixDtype::Q8_0 if self.device.is_cpu() => {
                self.find_file(&parameter.name)?.map_matrix(&parameter.name, &parameter.shape)?
            }
            _ => None,
        };
        match mapped {
            Some(mapped) => Ok(mapped.into()),
            None => Ok(self.load_vector(parameter)?.into()),
        }
    }
}

impl LanguageModel {
    /// Loads a model as f32 from `config.json` and `model.safetensors` (or its shards), whose
    /// tensors are f32, bf16 or f16.
    pub fn load_f32(dir: &Path, device: &Device) -> Result<Self, ModelError> {
        Self::load_with_dtype(dir, device, MatrixDtype::F32)
    }

    /// Loads a model from a directory or a GGUF file. Reads one tensor at a time: beside the model
    /// itself, at most one block of a file is in memory.
    pub fn load_with_dtype(
        dir: &Path,
        device: &Device,
        dtype: MatrixDtype,
    ) -> Result<Self, ModelError> {
        if dtype == MatrixDtype::Q8_0 && !device.is_cpu() {
            return Err(ModelError::QuantizedDevice);
        }
        if dir.is_file() {
            return Self::load_gguf(dir, device, dtype);
        }
        let config = ModelConfig::from_dir(dir)?;
        config.require_embedded(dir)?;
        memory::check_memory(&config, dtype, device)?;
        let files = list_weight_files(dir)?;
        let files = files.iter().map(|path| TensorFile::open(path));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let mut places = BTreeMap::new();
        for file in &files {
            places.extend(file.tensor_names().into_iter().map(|name| (name, file)));
        }
        let weights = DecoderWeights::build(
            &config,
            dtype,
            DirectoryWeights { dir, files_by_name: places, dtype, device },
        )?;
        Ok(Self { source: Some(dir.into()), ..Self::from_parts(config, weights, device, dtype) })
    }

    fn from_parts(
        config: ModelConfig,
        weights: DecoderWeights,
        device: &Device,
        dtype: MatrixDtype,
    ) -> Self {
        let frequencies = rope::rotary_frequencies(&config);
        let device = device.clone();
        Self { config, weights, unmerged_adapter: None, device, dtype, frequencies, source: None }
    }

    /// Creates a model with random weights: matrices normal with `initializer_range`, biases zero,
    /// norms one. Each tensor has its own random stream, named after it.
    pub fn init_random(
        config: ModelConfig,
        seed: u64,
        device: &Device,
    ) -> Result<Self, ModelError> {
        memory::check_memory(&config, MatrixDtype::F32, device)?;
        let deviation = config.initializer_range;
        let f32 = MatrixDtype::F32;
        let weights =
            DecoderWeights::build(&config, f32, |ModelParameter { name, shape, kind }| {
                let count: usize = shape.iter().product();
                let values: Vec<f32> = match kind {
                    ParameterKind::Norm => vec![1.0; count],
                    ParameterKind::Bias => vec![0.0; count],
                    ParameterKind::Matrix => {
                        let mut random = RandomStream::for_part(seed, &name);
                        (0..count).map(|_| (random.next_normal() * deviation) as f32).collect()
                    }
                };
                Tensor::from_vec(values, shape, device)
            })?;
        Ok(Self::from_parts(config, weights, device, f32))
    }

    /// Creates a random model with the configuration of a directory. `save_directory` copies the
    /// tokenizer of that directory.
    pub fn init_from_directory(dir: &Path, seed: u64, device: &Device) -> Result<Self, ModelError> {
        let config = ModelConfig::from_dir(dir)?;
        config.require_embedded(dir)?;
        let model = Self::init_random(config, seed, device)?;
        Ok(Self { source: Some(dir.into()), ..model })
    }

    /// Returns the model's configuration.
    pub fn model_config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the number of parameters.
    pub fn parameter_count(&self) -> usize {
        self.weights.named_parameters().iter().map(|(_, matrix)| matrix.element_count()).sum()
    }

    pub(crate) fn matrix_dtype(&self) -> DType {
        self.dtype.for_kind(ParameterKind::Matrix)
    }

    pub(crate) fn matrix_form(&self) -> MatrixForm {
        self.weights.output_matrix().matrix_form()
    }

    /// Packs the weights for a process that draws samples: decoding is then up to twice as fast,
    /// and the memory is not shared with other processes. Returns the model as it is if that would
    /// leave less memory than the weights have, on other devices than the CPU, for f32, and on
    /// processors without bf16 instructions.
    pub fn into_packed(mut self) -> Result<Self, ModelError> {
        let elements: usize =
            self.weights.matrices_mut().iter().map(|matrix| matrix.element_count()).sum();
        let fits = memory::available_bytes().is_some_and(|free| free >= 4 * elements as u128);
        let kernel = MatmulKernel::for_packed_weights().filter(|_| fits);
        let Some(kernel) = kernel.filter(|_| self.matrix_form() == MatrixForm::Bf16Rows) else {
            return Ok(self);
        };
        WeightMatrix::pack_all(kernel, &mut self.weights.matrices_mut())?;
        if let Some(adapter) = &mut self.unmerged_adapter {
            Arc::make_mut(adapter).pack_matrices(kernel)?;
        }
        Ok(self)
    }

    /// Drops the packed weights, with which a model cannot be trained.
    pub(crate) fn into_unpacked(mut self) -> Self {
        self.weights.matrices_mut().into_iter().for_each(WeightMatrix::drop_packed);
        self
    }

    pub(crate) fn head_shape(&self) -> HeadShape {
        let ModelConfig { heads, kv_heads, head_dim, .. } = self.config;
        HeadShape { count: heads, kv_count: kv_heads, dim: head_dim }
    }

    /// Checks that the host has memory for a copy of this model. An f32 model that gets an adapter
    /// while it is shared needs at most that.
    pub fn check_room_for_copy(&self) -> Result<(), ModelError> {
        memory::check_memory(&self.config, self.dtype, &self.device)
    }

    /// Returns the model with an adapter; `self` is unchanged.
    pub fn with_adapter(&self, adapter: &LoraAdapter) -> Result<Self, AdapterError> {
        self.clone().into_adapted(adapter)
    }

    /// Returns the model with an adapter. An f32 model merges it, which needs no more memory for
    /// weights that are not shared; others keep it unmerged.
    pub fn into_adapted(mut self, adapter: &LoraAdapter) -> Result<Self, AdapterError> {
        adapter.check_fits(&self.config)?;
        if !self.dtype.merges_adapters() {
            if self.unmerged_adapter.is_some() {
                return Err(AdapterError::SecondAdapter);
            }
            let mut own = adapter.to_device(&self.device)?.cast_matrices(DType::BF16)?;
            if self.matrix_form().for_adapter() == MatrixForm::Packed {
                own.pack_matrices(MatmulKernel::select_best(MatmulPhase::Decode))?;
            }
            self.unmerged_adapter = Some(Arc::new(own));
            return Ok(self);
        }
        for ((layer, module), pair) in &adapter.pairs {
            let (a, b) = (pair.a.to_device(&self.device)?, pair.b.to_device(&self.device)?);
            let scaled = (b * pair.scale)?;
            let weight = &mut self.weights.layers[*layer].linears[*module as usize].weight;
            *weight = (weight.to_tensor()? + matmul::multiply_f32(&scaled, &a)?)?.into();
        }
        Ok(self)
    }

    /// Returns the engine's name for records, with the type of the matrices unless it is f32.
    pub fn engine_name(&self) -> String {
        match self.dtype {
            MatrixDtype::F32 => crate::ENGINE.to_owned(),
            dtype => format!("{}-{}", crate::ENGINE, dtype.type_name()),
        }
    }

    /// Writes `model.safetensors` and `config.json`. Copies the tokenizer's files if the model was
    /// loaded from another directory.
    pub fn save_directory(&self, dir: &Path) -> Result<(), ModelError> {
        let file = |path: &Path| {
            let path = path.to_owned();
            move |source| ModelError::File { path, source }
        };
        if self.unmerged_adapter.is_some() {
            return Err(ModelError::UnmergedAdapter { dtype: self.dtype.type_name() });
        }
        std::fs::create_dir_all(dir).map_err(file(dir))?;
        tensor_file::write_tensors(&dir.join(SINGLE_WEIGHTS_FILE), self.weights.named_tensors()?)?;
        let path = dir.join("config.json");
        let mut config = self.config.to_json();
        if self.dtype == MatrixDtype::Bf16 {
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
}
