//! Typed access to the fields of a `config.json`.

use super::{Architecture, ConfigError, RopeScaling};
use serde_json::{Map, Value};
use std::path::Path;

/// Bounds far above any real model, so that a damaged file is refused rather than allocated.
pub(super) const MAX_WIDTH: usize = 1 << 18;
pub(super) const MAX_VOCAB: usize = 1 << 22;
pub(super) const MAX_HEADS: usize = 1 << 12;
pub(super) const MAX_LAYERS: usize = 1 << 12;
pub(super) const MAX_POSITIONS: usize = 1 << 28;

/// What transformers assumes when the file says nothing.
const DEFAULT_THETA: f64 = 10_000.0;

pub(super) fn read_object(path: &Path) -> Result<Map<String, Value>, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.into(), source })?;
    serde_json::from_str(&text).map_err(|source| ConfigError::Json { path: path.into(), source })
}

/// The fields of one file, or of one object in it.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    pub(super) map: &'a Map<String, Value>,
    pub(super) path: &'a Path,
}

impl<'a> Fields<'a> {
    pub(super) fn invalid(
        &self,
        field: &'static str,
        found: String,
        expected: &'static str,
    ) -> ConfigError {
        ConfigError::Invalid { path: self.path.into(), field, found, expected }
    }

    fn unsupported(
        &self,
        field: &'static str,
        found: &Value,
        supported: &'static str,
    ) -> ConfigError {
        let found = found.as_str().map_or_else(|| found.to_string(), str::to_owned);
        ConfigError::Unsupported { path: self.path.into(), field, found, supported }
    }

    /// A field that is absent or null is `None`.
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    fn require(&self, field: &'static str) -> Result<&'a Value, ConfigError> {
        self.get(field).ok_or_else(|| ConfigError::Missing { path: self.path.into(), field })
    }

    pub(super) fn size(&self, field: &'static str, most: usize) -> Result<usize, ConfigError> {
        let value = self.require(field)?;
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.filter(|size| (1..=most).contains(size))
            .ok_or_else(|| self.invalid(field, value.to_string(), "a positive size within reason"))
    }

    pub(super) fn size_or(
        &self,
        field: &'static str,
        default: usize,
        most: usize,
    ) -> Result<usize, ConfigError> {
        if self.get(field).is_some() { self.size(field, most) } else { Ok(default) }
    }

    fn number(&self, field: &'static str) -> Result<f64, ConfigError> {
        let value = self.require(field)?;
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        number.ok_or_else(|| self.invalid(field, value.to_string(), "a positive number"))
    }

    pub(super) fn number_or(&self, field: &'static str, default: f64) -> Result<f64, ConfigError> {
        if self.get(field).is_some() { self.number(field) } else { Ok(default) }
    }

    pub(super) fn flag(&self, field: &'static str) -> Result<bool, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(false) };
        value.as_bool().ok_or_else(|| self.invalid(field, value.to_string(), "true or false"))
    }

    fn object(&self, field: &'static str) -> Result<Option<Fields<'a>>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_object() {
            Some(map) => Ok(Some(Fields { map, path: self.path })),
            None => Err(self.invalid(field, value.to_string(), "an object")),
        }
    }

    pub(super) fn architecture(&self) -> Result<Architecture, ConfigError> {
        let found = self.require("model_type")?;
        let architecture = Architecture::ALL.into_iter().find(|one| *found == one.model_type());
        let Some(architecture) = architecture else {
            return Err(self.unsupported("model_type", found, "qwen2, qwen3, llama"));
        };
        let class = architecture.class();
        let classes = self.get("architectures").and_then(Value::as_array);
        match classes.and_then(|classes| classes.iter().find(|name| **name != class)) {
            Some(other) => Err(self.unsupported("architectures", other, class)),
            None => Ok(architecture),
        }
    }

    pub(super) fn refuse_what_is_not_computed(&self) -> Result<(), ConfigError> {
        if let Some(activation) = self.get("hidden_act").filter(|name| **name != "silu") {
            return Err(self.unsupported("hidden_act", activation, "silu"));
        }
        if self.flag("mlp_bias")? {
            return Err(self.unsupported("mlp_bias", &Value::Bool(true), "false"));
        }
        if let Some(quantization) = self.get("quantization_config") {
            return Err(self.unsupported("quantization_config", quantization, "f32, bf16, f16"));
        }
        self.refuse_sliding_windows()
    }

    /// A window's size may stand there though no layer uses it. Where the kinds of layers are
    /// listed, the list decides.
    fn refuse_sliding_windows(&self) -> Result<(), ConfigError> {
        let Some(kinds) = self.get("layer_types") else {
            return match self.flag("use_sliding_window")? {
                true => Err(self.unsupported("use_sliding_window", &Value::Bool(true), "false")),
                false => Ok(()),
            };
        };
        let Some(kinds) = kinds.as_array() else {
            return Err(self.invalid("layer_types", kinds.to_string(), "a list of kinds"));
        };
        match kinds.iter().find(|kind| **kind != "full_attention") {
            Some(other) => Err(self.unsupported("layer_types", other, "full_attention")),
            None => Ok(()),
        }
    }

    pub(super) fn rope(&self) -> Result<(f64, Option<RopeScaling>), ConfigError> {
        let theta = self.number_or("rope_theta", DEFAULT_THETA)?;
        let found = match self.object("rope_parameters")? {
            Some(rope) => Some(("rope_parameters", rope)),
            None => self.object("rope_scaling")?.map(|rope| ("rope_scaling", rope)),
        };
        let Some((field, rope)) = found else { return Ok((theta, None)) };
        let theta = rope.number_or("rope_theta", theta)?;
        for fields in [self, &rope] {
            if let Some(share) = fields.get("partial_rotary_factor").filter(|one| **one != 1.0) {
                return Err(self.unsupported("partial_rotary_factor", share, "1"));
            }
        }
        let Some(kind) = rope.get("rope_type").or_else(|| rope.get("type")) else {
            // Parameters by kind of layer lie one level deeper.
            return match rope.map.values().find(|value| value.is_object()) {
                Some(deeper) => Err(self.unsupported(field, deeper, "one rope for all layers")),
                None => Ok((theta, None)),
            };
        };
        match kind.as_str() {
            Some("default") => Ok((theta, None)),
            Some("llama3") => Ok((theta, Some(rope.rope_scaling()?))),
            _ => Err(self.unsupported(field, kind, "default, llama3")),
        }
    }

    fn rope_scaling(&self) -> Result<RopeScaling, ConfigError> {
        let scaling = RopeScaling {
            factor: self.number("factor")?,
            low_freq_factor: self.number("low_freq_factor")?,
            high_freq_factor: self.number("high_freq_factor")?,
            original_max_positions: self.size("original_max_position_embeddings", MAX_POSITIONS)?,
        };
        if scaling.high_freq_factor <= scaling.low_freq_factor {
            let found = scaling.high_freq_factor.to_string();
            return Err(self.invalid("high_freq_factor", found, "more than low_freq_factor"));
        }
        Ok(scaling)
    }

    pub(super) fn eos_tokens(&self, vocab_size: usize) -> Result<Vec<u32>, ConfigError> {
        let Some(value) = self.get("eos_token_id") else { return Ok(Vec::new()) };
        let listed = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
        let token = |one: &Value| {
            let id = one.as_u64().and_then(|id| u32::try_from(id).ok());
            id.filter(|id| (*id as usize) < vocab_size).ok_or_else(|| {
                self.invalid("eos_token_id", value.to_string(), "token ids within vocab_size")
            })
        };
        listed.iter().map(token).collect()
    }
}
