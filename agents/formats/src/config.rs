//! Parses a Hugging Face `config.json` into the shape of a model, and refuses models that cannot be
//! computed as their files say. It reads the fields of transformers 4 (`rope_theta`, `rope_scaling`)
//! and of transformers 5 (`rope_parameters`, `layer_types`).

mod details;
mod end_token;
pub(crate) mod fields;
mod model_kind;
mod rope_fields;
mod upstream_settings;

use crate::Architecture;
use crate::architecture::QueryNorms;
use crate::layer_module::LayerModule;
pub use details::{ArchitectureDetails, ExpertShape, GraniteFactors, LongRope};
use fields::{
    ConfigFields, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, read_object,
};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
pub(crate) use upstream_settings::replace_upstream_settings;

/// The rope scaling of Llama 3.1, which stretches rotations of low frequency.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeScaling {
    /// The divisor of the lowest frequencies.
    pub factor: f64,
    /// Wavelengths above `original_max_positions / low_freq_factor` are stretched in full.
    pub low_freq_factor: f64,
    /// Wavelengths below `original_max_positions / high_freq_factor` are not stretched.
    pub high_freq_factor: f64,
    pub original_max_positions: usize,
}

/// The shape of a model, as far as it decides what the engine computes. Sizes were checked against
/// bounds, so products of them do not overflow 128 bits.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub architecture: Architecture,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    /// Divides `heads`.
    pub kv_heads: usize,
    /// An even number.
    pub head_dim: usize,
    /// Where the model has a window that llama.cpp and the embedded engine lack, its size: up to
    /// there all tokens see each other anyway.
    pub max_positions: usize,
    pub norm_epsilon: f64,
    pub rope_theta: f64,
    pub rope_scaling: Option<RopeScaling>,
    /// True if q, k, v and, except in Qwen2, o have biases.
    pub attention_bias: bool,
    pub tied_embeddings: bool,
    /// The tokens that end generation. Training ends its examples with the first one: the
    /// `eos_token` of `tokenizer_config.json` if it is among them, because chat models end their
    /// turns with it.
    pub eos_tokens: Vec<u32>,
    /// The standard deviation of a random initialisation.
    pub initializer_range: f64,
    pub details: ArchitectureDetails,
}

/// The reason why a model's configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelConfigError {
    #[error("could not read {path}; is it a Hugging Face model directory? (M101)")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not valid JSON (F106)")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{path}: field `{field}` is missing (M104)")]
    Missing { path: PathBuf, field: &'static str },
    #[error("{path}: field `{field}` is {found}, expected {expected} (M104)")]
    Invalid { path: PathBuf, field: &'static str, found: String, expected: &'static str },
    #[error("{path}: {field} `{found}` is not supported; supported: {supported} (M104)")]
    Unsupported { path: PathBuf, field: &'static str, found: String, supported: &'static str },
    #[error("{path}: model_type `{found}` is not supported; use a model of {nearest} (M104)")]
    UnknownModel { path: PathBuf, found: String, nearest: String },
    #[error(
        "{path}: field `auto_map` names code of the model's directory ({code}), which is never run; \
         use a model of {nearest} (M104)"
    )]
    OwnCode { path: PathBuf, code: String, nearest: String },
    #[error(
        "{path}: field `quantization_config` says that the weights are quantised ({method}); they \
         can be neither trained nor converted: use the model that they were made from{original} \
         (M104)"
    )]
    Quantized { path: PathBuf, method: String, original: String },
    #[error(
        "{path}: the embedded engine does not compute models of {found}, only of {embedded}; choose \
         llama.cpp (--engine, or --generator-engine and --evaluator-engine of an agent) and \
         --trainer-engine pytorch (M104)"
    )]
    NotEmbedded { path: PathBuf, found: String, embedded: String },
}

impl ModelConfig {
    /// Reads `config.json` of a model directory, and the end tokens of `generation_config.json`.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelConfigError> {
        let path = dir.join("config.json");
        let mut config = Self::from_json(&read_object(&path)?, &path)?;
        config.eos_tokens = complete_end_tokens(dir, config.eos_tokens, config.vocab_size)?;
        Ok(config)
    }

    /// Parses the object of a `config.json`: of a model with images, its text part. `path` is only
    /// named in errors.
    pub fn from_json(map: &Map<String, Value>, path: &Path) -> Result<Self, ModelConfigError> {
        let map = ConfigFields { map, path }.read_text_part()?;
        let fields = ConfigFields { map: &map, path };
        let architecture = fields.read_architecture()?;
        fields.check_supported(architecture)?;
        let hidden_size = fields.read_size("hidden_size", MAX_WIDTH)?;
        let heads = fields.read_size("num_attention_heads", MAX_HEADS)?;
        let kv_heads = fields.read_size_or("num_key_value_heads", heads, MAX_HEADS)?;
        let usual_dim = usual_head_dim(architecture).unwrap_or(hidden_size / heads);
        let head_dim = fields.read_size_or("head_dim", usual_dim, MAX_WIDTH)?;
        if heads % kv_heads != 0 {
            let found = format!("{kv_heads}");
            let expected = "a divisor of num_attention_heads";
            return Err(fields.invalid_error("num_key_value_heads", found, expected));
        }
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(fields.invalid_error("head_dim", format!("{head_dim}"), "an even number"));
        }
        let vocab_size = fields.read_size("vocab_size", MAX_VOCAB)?;
        let layers = fields.read_size("num_hidden_layers", MAX_LAYERS)?;
        let positions = fields.read_size("max_position_embeddings", MAX_POSITIONS)?;
        let rope = fields.read_rope_settings(architecture, positions)?;
        let config = Self {
            architecture,
            vocab_size,
            hidden_size,
            intermediate_size: fields.read_size("intermediate_size", MAX_WIDTH)?,
            layers,
            heads,
            kv_heads,
            head_dim,
            max_positions: fields.read_window(architecture)?.unwrap_or(positions).min(positions),
            norm_epsilon: fields.read_number_or("rms_norm_eps", 1e-6)?,
            rope_theta: rope.theta,
            rope_scaling: rope.scaling,
            attention_bias: match architecture {
                Architecture::Qwen2 => true,
                Architecture::Mistral => false,
                _ => fields.read_flag("attention_bias")?,
            },
            tied_embeddings: fields
                .read_flag_or("tie_word_embeddings", architecture.traits().tied_by_default)?,
            eos_tokens: fields.read_eos_tokens(vocab_size)?,
            initializer_range: fields.read_number_or("initializer_range", 0.02)?,
            details: ArchitectureDetails::read_from(&fields, architecture, rope.details)?,
        };
        config.check_details(&fields)?;
        Ok(config)
    }

    /// Checks that the embedded engine computes the architecture. `dir` is only named in errors.
    pub fn require_embedded(&self, dir: &Path) -> Result<(), ModelConfigError> {
        if self.architecture.is_embedded() {
            return Ok(());
        }
        Err(not_embedded_error(dir, self.architecture.model_type()))
    }

    /// Returns the shape of a projection's weight: (outputs, inputs).
    pub fn weight_shape(&self, module: LayerModule) -> (usize, usize) {
        let (query, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        match module {
            LayerModule::Query => (query, self.hidden_size),
            LayerModule::Key | LayerModule::Value => (kv, self.hidden_size),
            LayerModule::Output => (self.hidden_size, query),
            LayerModule::Gate | LayerModule::Up => (self.intermediate_size, self.hidden_size),
            LayerModule::Down => (self.hidden_size, self.intermediate_size),
        }
    }

    /// Returns true if a projection has a bias.
    pub fn has_bias(&self, module: LayerModule) -> bool {
        let possible = match module {
            LayerModule::Query | LayerModule::Key | LayerModule::Value => true,
            LayerModule::Output => self.architecture != Architecture::Qwen2,
            LayerModule::Gate | LayerModule::Up | LayerModule::Down => false,
        };
        possible && self.attention_bias
    }

    /// Returns true if the heads of q and k are normalised, each with its own weights.
    pub fn has_head_norms(&self) -> bool {
        self.architecture.traits().query_norms == QueryNorms::Heads
    }

    /// Returns the numbers of weights that normalise queries and keys.
    pub(crate) fn query_norm_sizes(&self) -> Option<[usize; 2]> {
        match self.architecture.traits().query_norms {
            QueryNorms::Absent => None,
            QueryNorms::Heads => Some([self.head_dim; 2]),
            QueryNorms::Whole => Some([self.heads * self.head_dim, self.kv_heads * self.head_dim]),
        }
    }

    /// Counts the parameters; cannot overflow for any model that this type can describe.
    pub fn count_parameters(&self) -> u128 {
        let wide = |n: usize| n as u128;
        let of_module = |module: LayerModule| {
            let (outputs, inputs) = self.weight_shape(module);
            let bias = if self.has_bias(module) { wide(outputs) } else { 0 };
            wide(outputs) * wide(inputs) + bias
        };
        let (attention, feed_forward) = LayerModule::ALL.split_at(4);
        let attention: u128 = attention.iter().copied().map(of_module).sum();
        let feed_forward: u128 = match &self.details.experts {
            Some(experts) => {
                wide(experts.count) * wide(self.hidden_size) * (3 * wide(experts.width) + 1)
            }
            None => feed_forward.iter().copied().map(of_module).sum(),
        };
        let query_norms: u128 = self.query_norm_sizes().iter().flatten().copied().map(wide).sum();
        let norms = self.architecture.traits().layer_norms.len();
        let layer = attention + feed_forward + query_norms + wide(norms) * wide(self.hidden_size);
        let tables = if self.tied_embeddings { 1 } else { 2 };
        wide(self.layers) * layer + (tables * wide(self.vocab_size) + 1) * wide(self.hidden_size)
    }

    /// Returns the `config.json` with which transformers loads the model, of an architecture that
    /// the embedded engine computes.
    pub fn to_json(&self) -> Value {
        let eos = match self.eos_tokens.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            many => json!(many),
        };
        let mut rope = json!({"rope_type": "default"});
        if let Some(scaling) = self.rope_scaling {
            rope = json!({
                "factor": scaling.factor,
                "high_freq_factor": scaling.high_freq_factor,
                "low_freq_factor": scaling.low_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
                "rope_type": "llama3",
            });
        }
        let scaling = if self.rope_scaling.is_some() { rope.clone() } else { Value::Null };
        rope["rope_theta"] = json!(self.rope_theta);
        let mut config = json!({
            "architectures": [self.architecture.class_name()],
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
            "model_type": self.architecture.model_type(),
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tied_embeddings,
            "use_cache": true,
            "use_sliding_window": false,
            "vocab_size": self.vocab_size,
        });
        if self.architecture != Architecture::Qwen2 {
            config["attention_bias"] = json!(self.attention_bias);
        }
        if scaling != Value::Null {
            config["rope_scaling"] = scaling;
        }
        config
    }
}

pub(crate) fn not_embedded_error(dir: &Path, model_type: &str) -> ModelConfigError {
    let embedded: Vec<&str> = Architecture::list_embedded().map(Architecture::model_type).collect();
    ModelConfigError::NotEmbedded {
        path: dir.join("config.json"),
        found: model_type.to_owned(),
        embedded: embedded.join(", "),
    }
}

/// Adds the end tokens of `generation_config.json` to those of `config.json`, and puts the tokenizer's
/// first.
pub(crate) fn complete_end_tokens(
    dir: &Path,
    mut tokens: Vec<u32>,
    vocab_size: usize,
) -> Result<Vec<u32>, ModelConfigError> {
    let generation = dir.join("generation_config.json");
    if generation.exists() {
        let fields = read_object(&generation)?;
        let fields = ConfigFields { map: &fields, path: &generation };
        for token in fields.read_eos_tokens(vocab_size)? {
            if !tokens.contains(&token) {
                tokens.push(token);
            }
        }
    }
    if let [_, _, ..] = tokens.as_slice()
        && let Some(end) = end_token::read_end_token(dir)
        && let Some(at) = tokens.iter().position(|token| *token == end)
    {
        tokens[..=at].rotate_right(1);
    }
    Ok(tokens)
}

/// Returns the head size that transformers assumes without the field; `None` if the heads share the
/// model's width.
fn usual_head_dim(architecture: Architecture) -> Option<usize> {
    match architecture {
        Architecture::Qwen3 => Some(128),
        Architecture::Gemma2 | Architecture::Gemma3 => Some(256),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
