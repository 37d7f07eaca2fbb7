//! A model ready for use: weights, adapter and tokenizer together.

use crate::{Adapter, AdapterError, Model, ModelError, Tokenizer, TokenizerError, parse_device};
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
}

/// The model of a directory on a device (see [`parse_device`]), an adapter merged into it if one
/// is given, and its tokenizer.
pub fn load(
    base: &Path,
    adapter: Option<&Path>,
    device: &str,
) -> Result<(Model, Tokenizer), LoadError> {
    let device = parse_device(device).map_err(LoadError::Device)?;
    let mut model = Model::load(base, &device).map_err(LoadError::Model)?;
    if let Some(path) = adapter {
        let adapter = Adapter::load(path, model.config()).map_err(LoadError::Adapter)?;
        model = model.with_adapter(&adapter).map_err(LoadError::Merge)?;
    }
    let tokenizer = Tokenizer::load(base).map_err(LoadError::Tokenizer)?;
    Ok((model, tokenizer))
}
