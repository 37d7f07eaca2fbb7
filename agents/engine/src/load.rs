//! Loads a model ready for use: weights, adapter and tokenizer together.

use crate::{
    AdapterError, LanguageModel, LoraAdapter, MatrixDtype, ModelError, ModelTokenizer,
    TokenizerError, parse_device,
};
use std::path::Path;

/// The step that failed while loading a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelLoadError {
    #[error("choose the device")]
    Device(#[source] ModelError),
    #[error("load the model")]
    Model(#[source] ModelError),
    #[error("load the adapter")]
    Adapter(#[source] AdapterError),
    #[error("merge the adapter")]
    Merge(#[source] AdapterError),
    #[error("load the tokenizer")]
    Tokenizer(#[source] TokenizerError),
    #[error("match the tokenizer with the model")]
    Mismatch(#[source] TokenizerError),
}

/// Loads the model of a directory on a device (see `parse_device`), with an adapter if one is
/// given, and its tokenizer.
pub fn load_model(
    base: &Path,
    adapter: Option<&Path>,
    device: &str,
    dtype: MatrixDtype,
) -> Result<(LanguageModel, ModelTokenizer), ModelLoadError> {
    let device = parse_device(device).map_err(ModelLoadError::Device)?;
    let tokenizer = ModelTokenizer::load_tokenizer(base).map_err(ModelLoadError::Tokenizer)?;
    let mut model =
        LanguageModel::load_with_dtype(base, &device, dtype).map_err(ModelLoadError::Model)?;
    tokenizer.check_fits(model.model_config()).map_err(ModelLoadError::Mismatch)?;
    if let Some(path) = adapter {
        let adapter =
            LoraAdapter::load_peft(path, model.model_config()).map_err(ModelLoadError::Adapter)?;
        model = model.into_adapted(&adapter).map_err(ModelLoadError::Merge)?;
    }
    Ok((model, tokenizer))
}
