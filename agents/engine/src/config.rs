//! Parses a Hugging Face `config.json` into the shape of a model, refusing what the engine does
//! not compute. Reads both `rope_theta` and transformers 5's `rope_parameters`.

use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Biases on q, k and v.
    Qwen2,
    /// No biases.
    Llama,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    pub architecture: Architecture,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub max_positions: usize,
    pub norm_epsilon: f64,
    pub rope_theta: f64,
    pub tied_embeddings: bool,
    /// Generation stops at any of these; `generation_config.json` may name others.
    pub eos_tokens: Vec<u32>,
    /// Standard deviation of a random start.
    pub initializer_range: f64,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("could not read {path}; is it a Hugging Face model directory?")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not valid JSON")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{path}: field `{field}` is missing")]
    Missing { path: PathBuf, field: &'static str },
    #[error("{path}: field `{field}` is {found}, expected {expected}")]
    Invalid { path: PathBuf, field: &'static str, found: String, expected: &'static str },
    #[error("{path}: {field} `{found}` is not supported; supported: {supported}")]
    Unsupported { path: PathBuf, field: &'static str, found: String, supported: &'static str },
}

impl Config {
    /// Reads `config.json` of a model directory, and end tokens of `generation_config.json`.
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        let path = dir.join("config.json");
        let mut config = Self::from_json(&read_object(&path)?, &path)?;
        let generation = dir.join("generation_config.json");
        if generation.exists() {
            let fields = read_object(&generation)?;
            let fields = Fields { map: &fields, path: &generation };
            for token in fields.eos_tokens(config.vocab_size)? {
                if !config.eos_tokens.contains(&token) {
                    config.eos_tokens.push(token);
                }
            }
        }
        Ok(config)
    }

    /// `path` is named in errors.
    pub fn from_json(map: &Map<String, Value>, path: &Path) -> Result<Self, ConfigError> {
        let fields = Fields { map, path };
        let architecture = fields.architecture()?;
        fields.refuse_what_is_not_computed(architecture)?;
        let hidden_size = fields.size("hidden_size", MAX_WIDTH)?;
        let heads = fields.size("num_attention_heads", MAX_HEADS)?;
        let kv_heads = fields.size_or("num_key_value_heads", heads, MAX_HEADS)?;
        let head_dim = fields.size_or("head_dim", hidden_size / heads, MAX_WIDTH)?;
        if heads % kv_heads != 0 {
            let found = format!("{kv_heads}");
            let expected = "a divisor of num_attention_heads";
            return Err(fields.invalid("num_key_value_heads", found, expected));
        }
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(fields.invalid("head_dim", format!("{head_dim}"), "an even number"));
        }
        let vocab_size = fields.size("vocab_size", MAX_VOCAB)?;
        Ok(Self {
            architecture,
            vocab_size,
            hidden_size,
            intermediate_size: fields.size("intermediate_size", MAX_WIDTH)?,
            layers: fields.size("num_hidden_layers", MAX_LAYERS)?,
            heads,
            kv_heads,
            head_dim,
            max_positions: fields.size("max_position_embeddings", MAX_POSITIONS)?,
            norm_epsilon: fields.number_or("rms_norm_eps", 1e-6)?,
            rope_theta: fields.rope_theta()?,
            tied_embeddings: fields.flag("tie_word_embeddings")?,
            eos_tokens: fields.eos_tokens(vocab_size)?,
            initializer_range: fields.number_or("initializer_range", 0.02)?,
        })
    }

    pub fn qkv_bias(&self) -> bool {
        self.architecture == Architecture::Qwen2
    }

    /// What transformers needs to load the model.
    pub fn to_json(&self) -> Value {
        let (class, model_type) = match self.architecture {
            Architecture::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            Architecture::Llama => ("LlamaForCausalLM", "llama"),
        };
        let eos = match self.eos_tokens.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            many => json!(many),
        };
        json!({
            "architectures": [class],
            "attention_dropout": 0.0,
            "bos_token_id": null,
            "dtype": "float32",
            "torch_dtype": "float32",
            "eos_token_id": eos,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "model_type": model_type,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": self.tied_embeddings,
            "use_cache": true,
            "use_sliding_window": false,
            "vocab_size": self.vocab_size,
        })
    }
}

/// Bounds far above any real model, so that a damaged file is refused rather than allocated.
const MAX_WIDTH: usize = 1 << 18;
const MAX_VOCAB: usize = 1 << 22;
const MAX_HEADS: usize = 1 << 12;
const MAX_LAYERS: usize = 1 << 12;
const MAX_POSITIONS: usize = 1 << 28;

fn read_object(path: &Path) -> Result<Map<String, Value>, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.into(), source })?;
    serde_json::from_str(&text).map_err(|source| ConfigError::Json { path: path.into(), source })
}

/// Typed access to the fields of one file.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: &'a Path,
}

impl Fields<'_> {
    fn invalid(&self, field: &'static str, found: String, expected: &'static str) -> ConfigError {
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
    fn get(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    fn require(&self, field: &'static str) -> Result<&Value, ConfigError> {
        self.get(field).ok_or_else(|| ConfigError::Missing { path: self.path.into(), field })
    }

    fn size(&self, field: &'static str, most: usize) -> Result<usize, ConfigError> {
        let value = self.require(field)?;
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.filter(|size| (1..=most).contains(size))
            .ok_or_else(|| self.invalid(field, value.to_string(), "a positive size within reason"))
    }

    fn size_or(
        &self,
        field: &'static str,
        default: usize,
        most: usize,
    ) -> Result<usize, ConfigError> {
        if self.get(field).is_some() { self.size(field, most) } else { Ok(default) }
    }

    fn number_or(&self, field: &'static str, default: f64) -> Result<f64, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(default) };
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        number.ok_or_else(|| self.invalid(field, value.to_string(), "a positive number"))
    }

    fn flag(&self, field: &'static str) -> Result<bool, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(false) };
        value.as_bool().ok_or_else(|| self.invalid(field, value.to_string(), "true or false"))
    }

    fn architecture(&self) -> Result<Architecture, ConfigError> {
        let model_type = self.require("model_type")?;
        let (architecture, class) = match model_type.as_str() {
            Some("qwen2") => (Architecture::Qwen2, "Qwen2ForCausalLM"),
            Some("llama") => (Architecture::Llama, "LlamaForCausalLM"),
            _ => return Err(self.unsupported("model_type", model_type, "qwen2, llama")),
        };
        let classes = self.get("architectures").and_then(Value::as_array);
        match classes.and_then(|classes| classes.iter().find(|name| *name != class)) {
            Some(other) => Err(self.unsupported("architectures", other, class)),
            None => Ok(architecture),
        }
    }

    fn refuse_what_is_not_computed(&self, architecture: Architecture) -> Result<(), ConfigError> {
        if let Some(activation) = self.get("hidden_act").filter(|name| *name != "silu") {
            return Err(self.unsupported("hidden_act", activation, "silu"));
        }
        for field in ["use_sliding_window", "attention_bias", "mlp_bias"] {
            let meaningless = field == "attention_bias" && architecture == Architecture::Qwen2;
            if !meaningless && self.flag(field)? {
                return Err(self.unsupported(field, &Value::Bool(true), "false"));
            }
        }
        if let Some(quantization) = self.get("quantization_config") {
            return Err(self.unsupported("quantization_config", quantization, "f32, bf16, f16"));
        }
        Ok(())
    }

    fn rope_theta(&self) -> Result<f64, ConfigError> {
        for field in ["rope_parameters", "rope_scaling"] {
            let Some(rope) = self.get(field) else { continue };
            let Some(map) = rope.as_object() else {
                return Err(self.invalid(field, rope.to_string(), "an object"));
            };
            let kind = map.get("rope_type").or_else(|| map.get("type"));
            if let Some(kind) = kind.filter(|kind| *kind != "default") {
                return Err(self.unsupported(field, kind, "default"));
            }
            if map.contains_key("rope_theta") {
                return Fields { map, path: self.path }.number_or("rope_theta", DEFAULT_THETA);
            }
        }
        self.number_or("rope_theta", DEFAULT_THETA)
    }

    fn eos_tokens(&self, vocab_size: usize) -> Result<Vec<u32>, ConfigError> {
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

/// What transformers assumes when the file says nothing.
const DEFAULT_THETA: f64 = 10_000.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(change: impl FnOnce(&mut Map<String, Value>)) -> Result<Config, ConfigError> {
        let mut map = json!({
            "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 260,
            "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "rope_theta": 5e5, "tie_word_embeddings": true, "eos_token_id": [256, 258],
        });
        let map = map.as_object_mut().unwrap();
        change(map);
        Config::from_json(map, Path::new("config.json"))
    }

    #[test]
    fn both_generations_of_rope_settings_are_read_and_written() {
        let old = parsed(|_| {}).unwrap();
        assert_eq!((old.rope_theta, old.eos_tokens.as_slice()), (5e5, [256, 258].as_slice()));
        let new = parsed(|map| {
            map.remove("rope_theta");
            map.insert(
                "rope_parameters".into(),
                json!({"rope_theta": 5e5, "rope_type": "default"}),
            );
        });
        assert_eq!(new.unwrap(), old);
        let written = old.to_json();
        assert_eq!(Config::from_json(written.as_object().unwrap(), Path::new("")).unwrap(), old);
    }

    #[test]
    fn what_is_wrong_or_not_computed_is_refused_by_name() {
        for (field, value, expected) in [
            ("model_type", json!("gemma3"), "model_type `gemma3`"),
            ("architectures", json!(["Qwen2ForRewardModel"]), "Qwen2ForRewardModel"),
            ("hidden_size", Value::Null, "`hidden_size` is missing"),
            ("hidden_size", json!(-5), "`hidden_size` is -5"),
            ("num_hidden_layers", json!(1e18), "`num_hidden_layers`"),
            ("num_attention_heads", json!(0), "`num_attention_heads` is 0"),
            ("num_key_value_heads", json!(3), "a divisor of"),
            ("head_dim", json!(7), "an even number"),
            ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0}), "yarn"),
            ("use_sliding_window", json!(true), "use_sliding_window"),
            ("hidden_act", json!("gelu"), "gelu"),
            ("eos_token_id", json!(260), "within vocab_size"),
            ("rms_norm_eps", json!("small"), "`rms_norm_eps`"),
        ] {
            let error = parsed(|map| {
                map.insert(field.into(), value);
            });
            let error = error.unwrap_err().to_string();
            assert!(error.contains(expected), "{field}: {error}");
        }
    }
}
