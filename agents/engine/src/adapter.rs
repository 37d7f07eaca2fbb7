//! LoRA adapters in memory: which projections carry a pair, and how strongly it counts.

mod peft;

use crate::random::Random;
use crate::tensors::TensorFileError;
use candle_core::{DType, Device, Tensor};
use formats::peft::{MAX_RANK, Settings, SettingsError};
use formats::{Config, LoraSpec, Module};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// One low-rank pair: the module gains `scale * B A`. `a` is `[rank, in]`, `b` is `[out, rank]`.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    pub(crate) a: Tensor,
    pub(crate) b: Tensor,
    pub(crate) scale: f64,
}

/// An adapter in memory, f32 on the CPU or, while training, on the model's device.
#[derive(Debug, Clone)]
pub struct Adapter {
    pub(crate) pairs: BTreeMap<(usize, Module), Pair>,
    /// What `adapter_config.json` says; saved again as it was read.
    pub(crate) settings: Settings,
}

#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    #[error("could not read or write {path}; is it a PEFT adapter directory? (M101)")]
    File { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(
        "{path}: tensor `{name}` belongs to nothing this model has; was the adapter trained on another base model? (M107)"
    )]
    UnknownTensor { path: PathBuf, name: String },
    #[error(
        "{path}: tensor `{name}` changes the embedding or the head, which is not supported; train an adapter of projections only (M107)"
    )]
    Tables { path: PathBuf, name: String },
    #[error(
        "a LoRA adapter needs a rank from 1 to {most}, at least one module and a finite alpha other than 0 (R113)"
    )]
    Spec { most: usize },
    #[error(
        "the adapter's shapes do not fit this model; load it with the model it was trained on (M107)"
    )]
    OtherModel,
    #[error("a bf16 model takes one adapter; merge the first into the base as files (M113)")]
    Second,
    #[error("could not use the adapter's tensors")]
    Tensors(#[from] TensorFileError),
    #[error("tensor operation failed on the adapter (X101)")]
    Tensor(#[from] candle_core::Error),
}

impl Adapter {
    /// A is Kaiming-uniform as in PEFT, B is zero: the model starts unchanged.
    pub fn new(spec: &LoraSpec, config: &Config, seed: u64) -> Result<Self, AdapterError> {
        let sane = (1..=MAX_RANK).contains(&spec.rank) && !spec.modules.is_empty();
        if !sane || !spec.alpha.is_finite() || spec.alpha == 0.0 {
            return Err(AdapterError::Spec { most: MAX_RANK });
        }
        let settings = Settings::plain(spec);
        let mut pairs = BTreeMap::new();
        for layer in 0..config.layers {
            for module in spec.modules.iter().copied() {
                let (outputs, inputs) = module.shape(config);
                let mut random = Random::of_part(seed, &module.parameter(layer, "lora_A"));
                let a = kaiming_uniform(&mut random, spec.rank, inputs)?;
                let b = Tensor::from_vec(
                    vec![0f32; outputs * spec.rank],
                    (outputs, spec.rank),
                    &Device::Cpu,
                )?;
                let scale = settings.scale(layer, module, spec.rank);
                pairs.insert((layer, module), Pair { a, b, scale });
            }
        }
        Ok(Self { pairs, settings })
    }

    pub fn parameter_count(&self) -> usize {
        self.pairs.values().map(|pair| pair.a.elem_count() + pair.b.elem_count()).sum()
    }

    /// Parameters under the base model's names, with `lora_A.weight` and `lora_B.weight`.
    pub(crate) fn named(&self) -> Vec<(String, Tensor)> {
        let mut named = Vec::with_capacity(2 * self.pairs.len());
        for ((layer, module), pair) in &self.pairs {
            named.extend([
                (module.parameter(*layer, "lora_A.weight"), pair.a.clone()),
                (module.parameter(*layer, "lora_B.weight"), pair.b.clone()),
            ]);
        }
        named
    }

    /// Takes new values for all of them.
    pub(crate) fn replace(
        &mut self,
        mut values: BTreeMap<String, Tensor>,
    ) -> candle_core::Result<()> {
        let mut take = |name: String| {
            let missing = || candle_core::Error::msg(format!("`{name}` got no update"));
            values.remove(&name).ok_or_else(missing)
        };
        for ((layer, module), pair) in &mut self.pairs {
            pair.a = take(module.parameter(*layer, "lora_A.weight"))?;
            pair.b = take(module.parameter(*layer, "lora_B.weight"))?;
        }
        Ok(())
    }

    pub(crate) fn check_fits(&self, config: &Config) -> Result<(), AdapterError> {
        let fits = |((layer, module), pair): (&(usize, Module), &Pair)| {
            let shape = (pair.b.dims().first(), pair.a.dims().last());
            let (outputs, inputs) = module.shape(config);
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

    /// As a model with such matrices computes with it.
    pub(crate) fn cast(&self, precision: DType) -> candle_core::Result<Self> {
        let mut cast = self.clone();
        for pair in cast.pairs.values_mut() {
            (pair.a, pair.b) = (pair.a.to_dtype(precision)?, pair.b.to_dtype(precision)?);
        }
        Ok(cast)
    }
}

/// torch's `kaiming_uniform_(a=sqrt(5))`: uniform within 1 / sqrt(inputs).
fn kaiming_uniform(random: &mut Random, rank: usize, inputs: usize) -> candle_core::Result<Tensor> {
    let bound = 1.0 / (inputs as f64).sqrt();
    let draw = |_| ((2.0 * random.uniform() - 1.0) * bound) as f32;
    let values: Vec<f32> = (0..rank * inputs).map(draw).collect();
    Tensor::from_vec(values, (rank, inputs), &Device::Cpu)
}
