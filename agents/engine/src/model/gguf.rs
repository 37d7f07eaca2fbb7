//! Models from GGUF files, the format of llama.cpp.

use super::weights::{DecoderWeights, ModelParameter};
use super::{LanguageModel, MatrixDtype, ModelError, memory};
use candle_core::{Device, Tensor};
use formats::GgufModel;
use std::path::Path;

impl LanguageModel {
    /// Loads one tensor at a time; quantised tensors are converted to the values they represent.
    /// As 8 bits they become the same blocks again.
    pub(super) fn load_gguf(
        path: &Path,
        device: &Device,
        dtype: MatrixDtype,
    ) -> Result<Self, ModelError> {
        let file = GgufModel::open(path)?;
        let config = file.model_config().clone();
        memory::check_memory(&config, dtype, device)?;
        let weights =
            DecoderWeights::build(&config, dtype, |ModelParameter { name, shape, kind }| {
                let values = file.read_values(&name)?;
                let tensor = Tensor::from_vec(values, shape, device)?;
                Ok::<_, ModelError>(tensor.to_dtype(dtype.for_kind(kind))?)
            })?;
        Ok(Self::from_parts(config, weights, device, dtype))
    }
}
