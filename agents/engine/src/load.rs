//! A model ready for use: weights, adapter and tokenizer together.

use crate::{
    Adapter, AdapterError, Dtype, Model, ModelError, Tokenizer, TokenizerError, parse_device,
};
use std::path::Path;

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
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

/// The model of a directory on a device (see [`parse_device`]), with an adapter if one is given,
/// and its tokenizer.
pub fn load(
    base: &Path,
    adapter: Option<&Path>,
    device: &str,
    dtype: Dtype,
) -> Result<(Model, Tokenizer), LoadError> {
    let device = parse_device(device).map_err(LoadError::Device)?;
    let tokenizer = Tokenizer::load(base).map_err(LoadError::Tokenizer)?;
    let mut model = Model::load_as(base, &device, dtype).map_err(LoadError::Model)?;
    tokenizer.check_fits(model.config()).map_err(LoadError::Mismatch)?;
    if let Some(path) = adapter {
        let adapter = Adapter::load(path, model.config()).map_err(LoadError::Adapter)?;
        model = model.adapted(&adapter).map_err(LoadError::Merge)?;
    }
    Ok((model, tokenizer))
}
