//! An adapter in PEFT's directory.

use super::{Adapter, AdapterError, Pair};
use crate::tensors::{self, TensorFileError};
use formats::peft::{CONFIG_FILE, PREFIX, Settings, TENSOR_FILE};
use formats::{Config, Module};
use std::collections::BTreeMap;
use std::path::Path;

impl Adapter {
    /// Reads a PEFT adapter for a model of this shape.
    pub fn load(dir: &Path, config: &Config) -> Result<Self, AdapterError> {
        let settings = Settings::load(dir)?;
        let path = dir.join(TENSOR_FILE);
        let mut found = tensors::read(&path)?;
        let mut pairs = BTreeMap::new();
        for layer in 0..config.layers {
            for module in Module::ALL {
                let name = |part| format!("{PREFIX}{}", module.parameter(layer, part));
                let (a_name, b_name) = (name("lora_A.weight"), name("lora_B.weight"));
                let Some(a) = found.remove(&a_name) else { continue };
                let Some(b) = found.remove(&b_name) else {
                    let missing = TensorFileError::Missing { path, name: b_name };
                    return Err(missing.into());
                };
                let (outputs, inputs) = module.shape(config);
                let rank = settings.rank(layer, module);
                for (tensor, name, expected) in
                    [(&a, a_name, [rank, inputs]), (&b, b_name, [outputs, rank])]
                {
                    if tensor.dims() != expected {
                        let (found, expected) = (tensor.dims().to_vec(), expected.to_vec());
                        let wrong = TensorFileError::Shape { path, name, found, expected };
                        return Err(wrong.into());
                    }
                }
                let scale = settings.scale(layer, module, rank);
                pairs.insert((layer, module), Pair { a, b, scale });
            }
        }
        match found.into_keys().next() {
            Some(name) if is_of_tables(&name) => Err(AdapterError::Tables { path, name }),
            Some(name) => Err(AdapterError::UnknownTensor { path, name }),
            None if pairs.is_empty() => {
                let name = "any lora_A".to_owned();
                Err(TensorFileError::Missing { path, name }.into())
            }
            None => Ok(Self { pairs, settings }),
        }
    }

    /// Writes a directory that PEFT loads; `base` becomes `base_model_name_or_path`.
    pub fn save(&self, dir: &Path, base: &str) -> Result<(), AdapterError> {
        std::fs::create_dir_all(dir)
            .map_err(|source| AdapterError::File { path: dir.into(), source })?;
        let path = dir.join(CONFIG_FILE);
        std::fs::write(&path, self.settings.to_text(base))
            .map_err(|source| AdapterError::File { path, source })?;
        let named =
            self.named().into_iter().map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor));
        Ok(tensors::write(&dir.join(TENSOR_FILE), named)?)
    }
}

/// Of the tables at both ends of a model, which PEFT can adapt or save whole.
fn is_of_tables(name: &str) -> bool {
    let name = name.strip_prefix(PREFIX).unwrap_or(name);
    name.starts_with("model.embed_tokens.") || name.starts_with("lm_head.")
}
