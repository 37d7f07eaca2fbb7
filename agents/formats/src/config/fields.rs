//! Typed access to the fields of a `config.json`.

use super::{ModelConfigError, RopeScaling};
use crate::bounded_text::read_text;
use serde_json::{Map, Value};
use std::path::Path;

/// This bound and those below are far above any real model, so that a damaged file is refused
/// instead of allocated.
pub(crate) const MAX_WIDTH: usize = 1 << 18;
pub(crate) const MAX_VOCAB: usize = 1 << 22;
pub(crate) const MAX_HEADS: usize = 1 << 12;
pub(crate) const MAX_LAYERS: usize = 1 << 12;
pub(crate) const MAX_POSITIONS: usize = 1 << 28;

/// The largest settings: those of a tokenizer may describe 65 000 tokens, in 12 MB.
pub(crate) const SETTINGS_BYTES_MAX: u64 = 32 << 20;

pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>, ModelConfigError> {
    let text = read_text(path, SETTINGS_BYTES_MAX)
        .map_err(|source| ModelConfigError::Read { path: path.into(), source })?;
    serde_json::from_str(&text)
        .map_err(|source| ModelConfigError::Json { path: path.into(), source })
}

#[derive(Clone, Copy)]
pub(crate) struct ConfigFields<'a> {
    pub(crate) map: &'a Map<String, Value>,
    pub(crate) path: &'a Path,
}

impl<'a> ConfigFields<'a> {
    pub(crate) fn invalid_error(
        &self,
        field: &'static str,
        found: String,
        expected: &'static str,
    ) -> ModelConfigError {
        ModelConfigError::Invalid { path: self.path.into(), field, found, expected }
    }

    pub(crate) fn unsupported_error(
        &self,
        field: &'static str,
        found: &Value,
        supported: &'static str,
    ) -> ModelConfigError {
        let found = found.as_str().map_or_else(|| found.to_string(), str::to_owned);
        ModelConfigError::Unsupported { path: self.path.into(), field, found, supported }
    }

    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    pub(crate) fn require_field(&self, field: &'static str) -> Result<&'a Value, ModelConfigError> {
        self.get(field).ok_or_else(|| ModelConfigError::Missing { path: self.path.into(), field })
    }

    /// Reads a positive integer of at most `most`.
    pub(crate) fn read_size(
        &self,
        field: &'static str,
        most: usize,
    ) -> Result<usize, ModelConfigError> {
        let value = self.require_field(field)?;
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.filter(|size| (1..=most).contains(size)).ok_or_else(|| {
            self.invalid_error(field, value.to_string(), "a positive size within reason")
        })
    }

    /// Also reads a positive integer; an absent field gives `default`.
    pub(crate) fn read_size_or(
        &self,
        field: &'static str,
        default: usize,
        most: usize,
    ) -> Result<usize, ModelConfigError> {
        if self.get(field).is_some() { self.read_size(field, most) } else { Ok(default) }
    }

    pub(crate) fn read_number(&self, field: &'static str) -> Result<f64, ModelConfigError> {
        let value = self.require_field(field)?;
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        number.ok_or_else(|| self.invalid_error(field, value.to_string(), "a positive number"))
    }

    /// Also reads a positive finite number; an absent field gives `default`.
    pub(crate) fn read_number_or(
        &self,
        field: &'static str,
        default: f64,
    ) -> Result<f64, ModelConfigError> {
        if self.get(field).is_some() { self.read_number(field) } else { Ok(default) }
    }

    /// Reads a boolean; false if the field is absent.
    pub(crate) fn read_flag(&self, field: &'static str) -> Result<bool, ModelConfigError> {
        self.read_flag_or(field, false)
    }

    /// Also reads a boolean; an absent field gives `default`.
    pub(crate) fn read_flag_or(
        &self,
        field: &'static str,
        default: bool,
    ) -> Result<bool, ModelConfigError> {
        let Some(value) = self.get(field) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.invalid_error(field, value.to_string(), "true or false"))
    }

    /// Reads a positive number that may be absent.
    pub(crate) fn read_optional_number(
        &self,
        field: &'static str,
    ) -> Result<Option<f64>, ModelConfigError> {
        self.get(field).map(|_| self.read_number(field)).transpose()
    }

    pub(crate) fn nested_fields(
        &self,
        field: &'static str,
    ) -> Result<Option<ConfigFields<'a>>, ModelConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_object() {
            Some(map) => Ok(Some(ConfigFields { map, path: self.path })),
            None => Err(self.invalid_error(field, value.to_string(), "an object")),
        }
    }

    /// Reads the parameters of Llama 3.1's scaling.
    pub(crate) fn read_rope_scaling(&self) -> Result<RopeScaling, ModelConfigError> {
        let scaling = RopeScaling {
            factor: self.read_number("factor")?,
            low_freq_factor: self.read_number("low_freq_factor")?,
            high_freq_factor: self.read_number("high_freq_factor")?,
            original_max_positions: self
                .read_size("original_max_position_embeddings", MAX_POSITIONS)?,
        };
        if scaling.high_freq_factor <= scaling.low_freq_factor {
            let found = scaling.high_freq_factor.to_string();
            return Err(self.invalid_error("high_freq_factor", found, "more than low_freq_factor"));
        }
        Ok(scaling)
    }

    /// Reads a token or a list of tokens, each below `vocab_size`; an absent field gives none.
    pub(crate) fn read_eos_tokens(&self, vocab_size: usize) -> Result<Vec<u32>, ModelConfigError> {
        let Some(value) = self.get("eos_token_id") else { return Ok(Vec::new()) };
        let listed = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
        let token = |one: &Value| {
            let id = one.as_u64().and_then(|id| u32::try_from(id).ok());
            id.filter(|id| (*id as usize) < vocab_size).ok_or_else(|| {
                self.invalid_error("eos_token_id", value.to_string(), "token ids within vocab_size")
            })
        };
        listed.iter().map(token).collect()
    }
}
