//! Adapters as PEFT directories.

use super::{AdapterError, AdapterPair, LoraAdapter};
use crate::tensor_file::{self, TensorFileError};
use formats::peft::{AdapterSettings, BASE_NAME_PREFIX, CONFIG_FILE, TENSOR_FILE};
use formats::{LayerModule, ModelConfig};
use std::collections::BTreeMap;
use std::path::Path;

impl LoraAdapter {
    /// Reads a PEFT adapter for a model of this configuration.
    pub fn load_peft(dir: &Path, config: &ModelConfig) -> Result<Self, AdapterError> {
        let settings = AdapterSettings::from_dir(dir)?;
        let path = dir.join(TENSOR_FILE);
        let mut found = tensor_file::read_all(&path)?;
        let mut pairs = BTreeMap::new();
        for layer in 0..config.layers {
            for module in LayerModule::ALL {
                let name =
                    |part| format!("{BASE_NAME_PREFIX}{}", module.parameter_name(layer, part));
                let (a_name, b_name) = (name("lora_A.weight"), name("lora_B.weight"));
                let Some(a) = found.remove(&a_name) else { continue };
                let Some(b) = found.remove(&b_name) else {
                    let missing = TensorFileError::Missing { path, name: b_name };
                    return Err(missing.into());
                };
                let (outputs, inputs) = config.weight_shape(module);
                let rank = settings.module_rank(layer, module);
                for (tensor, name, expected) in
                    [(&a, a_name, [rank, inputs]), (&b, b_name, [outputs, rank])]
                {
                    if tensor.dims() != expected {
                        let (found, expected) = (tensor.dims().to_vec(), expected.to_vec());
                        let wrong = TensorFileError::Shape { path, name, found, expected };
                        return Err(wrong.into());
                    }
                }
                let scale = settings.module_scale(layer, module, rank);
                pairs.insert((layer, module), AdapterPair { a, b, scale, packed: None });
            }
        }
        match found.into_keys().next() {
            Some(name) if is_embedding_or_head(&name) => {
                Err(AdapterError::EmbeddingOrHead { path, name })
            }
            Some(name) => Err(AdapterError::UnknownTensor { path, name }),
            None if pairs.is_empty() => {
                let name = "any lora_A".to_owned();
                Err(TensorFileError::Missing { path, name }.into())
            }
            None => Ok(Self { pairs, settings }),
        }
    }

    /// Writes a directory that PEFT loads; `base` becomes `base_model_name_or_path`.
    pub fn save_peft(&self, dir: &Path, base: &str) -> Result<(), AdapterError> {
        std::fs::create_dir_all(dir)
            .map_err(|source| AdapterError::File { path: dir.into(), source })?;
        let path = dir.join(CONFIG_FILE);
        std::fs::write(&path, self.settings.to_text(base))
            .map_err(|source| AdapterError::File { path, source })?;
        let named = self
            .named_parameters()
            .into_iter()
            .map(|(name, tensor)| (format!("{BASE_NAME_PREFIX}{name}"), tensor));
        Ok(tensor_file::write_tensors(&dir.join(TENSOR_FILE), named)?)
    }
}

/// Returns true for tensors of the embedding or the head, which PEFT can adapt or save whole.
fn is_embedding_or_head(name: &str) -> bool {
    let name = name.strip_prefix(BASE_NAME_PREFIX).unwrap_or(name);
    name.starts_with("model.embed_tokens.") || name.starts_with("lm_head.")
}
