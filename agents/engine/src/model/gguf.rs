//! A model from a GGUF file, as llama.cpp has them.

use super::weights::{Parameter, Weights};
use super::{Dtype, Model, ModelError, memory};
use candle_core::{Device, Tensor};
use formats::GgufModel;
use std::path::Path;

impl Model {
    /// A tensor at a time. Quantised ones are held as what they stand for.
    pub(super) fn load_gguf(
        path: &Path,
        device: &Device,
        dtype: Dtype,
    ) -> Result<Self, ModelError> {
        let file = GgufModel::open(path)?;
        let config = file.config().clone();
        memory::check(&config, dtype, device)?;
        let weights = Weights::build(&config, |Parameter { name, shape, kind }| {
            let values = file.values(&name)?;
            let tensor = Tensor::from_vec(values, shape, device)?;
            Ok::<_, ModelError>(tensor.to_dtype(dtype.of(kind))?)
        })?;
        Ok(Self::of(config, weights, device, dtype))
    }
}
