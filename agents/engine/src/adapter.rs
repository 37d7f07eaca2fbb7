//! LoRA adapters in memory: the projections that have a low-rank pair, and the scale of each pair.

mod merge;
mod named_tensors;
mod peft;
mod soup;
mod weight_change;

pub use merge::{AdapterMerge, MergeErrors, MergeRule, OuterOptimizer};
pub use soup::SoupChoice;
pub use weight_change::{WeightChange, check_left_out};

use crate::ops::{matrix::WeightMatrix, packed::MatmulKernel};
use crate::random::RandomStream;
use crate::tensor_file::TensorFileError;
use candle_core::{DType, Device, Tensor};
use formats::peft::{AdapterSettings, AdapterSettingsError, MAX_RANK};
use formats::{LayerModule, LoraSpec, ModelConfig};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A low-rank pair: the weight of its projection changes by `scale * B A`.
#[derive(Debug, Clone)]
pub(crate) struct AdapterPair {
    /// `[rank, in]`
    pub(crate) a: Tensor,
    /// `[out, rank]`
    pub(crate) b: Tensor,
    pub(crate) scale: f64,
    /// A and B, packed as the weights of the model that has the adapter.
    pub(crate) packed: Option<[WeightMatrix; 2]>,
}

impl AdapterPair {
    /// Returns A and B, packed if the pair is.
    pub(crate) fn matrices(&self) -> [WeightMatrix; 2] {
        self.packed.clone().unwrap_or_else(|| [(&self.a).into(), (&self.b).into()])
    }
}

/// A LoRA adapter in memory: f32 on the CPU or, during training, on the model's device.
#[derive(Debug, Clone)]
pub struct LoraAdapter {
    pub(crate) pairs: BTreeMap<(usize, LayerModule), AdapterPair>,
    /// The content of `adapter_config.json`, saved again as it was read.
    pub(crate) settings: AdapterSettings,
}

/// The reason why an adapter cannot be created, read, saved or used.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    #[error("could not read or write {path}; is it a PEFT adapter directory? (M101)")]
    File { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Settings(#[from] AdapterSettingsError),
    #[error(
        "{path}: tensor `{name}` matches no module of this model; check that the adapter was \
         trained on this base model (M107)"
    )]
    UnknownTensor { path: PathBuf, name: String },
    #[error(
        "{path}: tensor `{name}` changes the embedding or the head, which is not supported; train an adapter of projections only (M107)"
    )]
    EmbeddingOrHead { path: PathBuf, name: String },
    #[error(
        "a LoRA adapter needs a rank from 1 to {most}, at least one module and a finite alpha other than 0 (R113)"
    )]
    Spec { most: usize },
    #[error(
        "the adapter's shapes do not fit this model; load it with the model it was trained on (M107)"
    )]
    OtherModel,
    /// A bf16 model has an adapter already.
    #[error("a bf16 model takes one adapter; merge the first into the base as files (M113)")]
    SecondAdapter,
    #[error(
        "{path} does not fit the adapter that it changes; it was damaged or belongs to another \
         training (M107)"
    )]
    Change { path: PathBuf },
    #[error("could not use the adapter's tensors")]
    Tensors(#[from] TensorFileError),
    #[error("tensor operation failed on the adapter (X101)")]
    Tensor(#[from] candle_core::Error),
}

impl LoraAdapter {
    /// Creates an adapter: A is Kaiming-uniform as in PEFT and B is zero, so that the model is
    /// unchanged at first.
    pub fn new(spec: &LoraSpec, config: &ModelConfig, seed: u64) -> Result<Self, AdapterError> {
        let sane = (1..=MAX_RANK).contains(&spec.rank) && !spec.modules.is_empty();
        if !sane || !spec.alpha.is_finite() || spec.alpha == 0.0 {
            return Err(AdapterError::Spec { most: MAX_RANK });
        }
        let settings = AdapterSettings::from_spec(spec);
        let mut pairs = BTreeMap::new();
        for layer in 0..config.layers {
            for module in spec.modules.iter().copied() {
                let (outputs, inputs) = config.weight_shape(module);
                let mut random =
                    RandomStream::for_part(seed, &module.parameter_name(layer, "lora_A"));
                let a = draw_kaiming_uniform(&mut random, spec.rank, inputs)?;
                let b = Tensor::from_vec(
                    vec![0f32; outputs * spec.rank],
                    (outputs, spec.rank),
                    &Device::Cpu,
                )?;
                let scale = settings.module_scale(layer, module, spec.rank);
                pairs.insert((layer, module), AdapterPair { a, b, scale, packed: None });
            }
        }
        Ok(Self { pairs, settings })
    }

    pub fn parameter_count(&self) -> usize {
        self.pairs.values().map(|pair| pair.a.elem_count() + pair.b.elem_count()).sum()
    }

    /// Names the matrices as the base model does, with `lora_A.weight` or `lora_B.weight`.
    pub(crate) fn named_parameters(&self) -> Vec<(String, Tensor)> {
        let mut named = Vec::with_capacity(2 * self.pairs.len());
        for ((layer, module), pair) in &self.pairs {
            named.extend([
                (module.parameter_name(*layer, "lora_A.weight"), pair.a.clone()),
                (module.parameter_name(*layer, "lora_B.weight"), pair.b.clone()),
            ]);
        }
        named
    }

    pub(crate) fn replace_parameters(
        &mut self,
        mut values: BTreeMap<String, Tensor>,
    ) -> candle_core::Result<()> {
        let mut take = |name: String| {
            let missing = || candle_core::Error::msg(format!("`{name}` got no update"));
            values.remove(&name).ok_or_else(missing)
        };
        for ((layer, module), pair) in &mut self.pairs {
            pair.a = take(module.parameter_name(*layer, "lora_A.weight"))?;
            pair.b = take(module.parameter_name(*layer, "lora_B.weight"))?;
        }
        Ok(())
    }

    pub(crate) fn check_fits(&self, config: &ModelConfig) -> Result<(), AdapterError> {
        let fits = |((layer, module), pair): (&(usize, LayerModule), &AdapterPair)| {
            let shape = (pair.b.dims().first(), pair.a.dims().last());
            let (outputs, inputs) = config.weight_shape(*module);
            *layer < config.layers && shape == (Some(&outputs), Some(&inputs))
        };
        if self.pairs.iter().all(fits) { Ok(()) } else { Err(AdapterError::OtherModel) }
    }

    pub(crate) fn to_device(&self, device: &Device) -> candle_core::Result<Self> {
        let mut moved = self.clone();
        for pair in moved.pairs.values_mut() {
            (pair.a, pair.b) = (pair.a.to_device(device)?, pair.b.to_device(device)?);
        }
        Ok(moved)
    }

    /// Packs the matrices, which must not change afterwards.
    pub(crate) fn pack_matrices(&mut self, kernel: MatmulKernel) -> candle_core::Result<()> {
        let mut matrices: Vec<_> = self.pairs.values().map(AdapterPair::matrices).collect();
        WeightMatrix::pack_all(kernel, &mut matrices.iter_mut().flatten().collect::<Vec<_>>())?;
        for (pair, matrices) in self.pairs.values_mut().zip(matrices) {
            pair.packed = Some(matrices);
        }
        Ok(())
    }

    pub(crate) fn cast_matrices(&self, precision: DType) -> candle_core::Result<Self> {
        let mut cast = self.clone();
        for pair in cast.pairs.values_mut() {
            (pair.a, pair.b) = (pair.a.to_dtype(precision)?, pair.b.to_dtype(precision)?);
        }
        Ok(cast)
    }
}

/// Draws as torch's `kaiming_uniform_(a=sqrt(5))`: uniform within 1 / sqrt(inputs).
fn draw_kaiming_uniform(
    random: &mut RandomStream,
    rank: usize,
    inputs: usize,
) -> candle_core::Result<Tensor> {
    let bound = 1.0 / (inputs as f64).sqrt();
    let draw = |_| ((2.0 * random.next_uniform() - 1.0) * bound) as f32;
    let values: Vec<f32> = (0..rank * inputs).map(draw).collect();
    Tensor::from_vec(values, (rank, inputs), &Device::Cpu)
}
