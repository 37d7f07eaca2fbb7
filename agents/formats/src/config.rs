//! Parses a Hugging Face `config.json` into the shape of a model, refusing what the engine does
//! not compute. Reads transformers 4's fields (`rope_theta`, `rope_scaling`) and 5's
//! (`rope_parameters`, `layer_types`).

mod end;
mod fields;

use crate::Module;
use fields::{Fields, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, read_object};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Qwen2 stands for Qwen2.5 too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Biases on q, k and v.
    Qwen2,
    /// Each head of q and k is normalised before it is rotated.
    Qwen3,
    Llama,
}

impl Architecture {
    pub const ALL: [Self; 3] = [Self::Qwen2, Self::Qwen3, Self::Llama];

    /// As in `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Llama => "llama",
        }
    }

    /// As in `config.json`'s `architectures`.
    pub fn class(self) -> &'static str {
        match self {
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Llama => "LlamaForCausalLM",
        }
    }
}

/// Llama 3.1's stretching of the slow rotations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeScaling {
    pub factor: f64,
    pub low_freq_factor: f64,
    pub high_freq_factor: f64,
    pub original_max_positions: usize,
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
    pub rope_scaling: Option<RopeScaling>,
    /// Biases on q, k, v and, but for Qwen2, o. Qwen2 has no choice.
    pub attention_bias: bool,
    pub tied_embeddings: bool,
    /// Generation stops at any of these; `generation_config.json` may name others. The first ends
    /// what is trained on: the one that `tokenizer_config.json` calls `eos_token`, if it is among
    /// them. Models that were taught to chat end their turns with it.
    pub eos_tokens: Vec<u32>,
    /// Standard deviation of a random start.
    pub initializer_range: f64,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
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
        if let [_, _, ..] = config.eos_tokens.as_slice()
            && let Some(end) = end::of_tokenizer(dir)
            && let Some(at) = config.eos_tokens.iter().position(|token| *token == end)
        {
            config.eos_tokens[..=at].rotate_right(1);
        }
        Ok(config)
    }

    /// `path` is named in errors.
    pub fn from_json(map: &Map<String, Value>, path: &Path) -> Result<Self, ConfigError> {
        let fields = Fields { map, path };
        let architecture = fields.architecture()?;
        fields.refuse_what_is_not_computed()?;
        let hidden_size = fields.size("hidden_size", MAX_WIDTH)?;
        let heads = fields.size("num_attention_heads", MAX_HEADS)?;
        let kv_heads = fields.size_or("num_key_value_heads", heads, MAX_HEADS)?;
        let usual_dim = match architecture {
            Architecture::Qwen3 => QWEN3_HEAD_DIM,
            Architecture::Qwen2 | Architecture::Llama => hidden_size / heads,
        };
        let head_dim = fields.size_or("head_dim", usual_dim, MAX_WIDTH)?;
        if heads % kv_heads != 0 {
            let found = format!("{kv_heads}");
            let expected = "a divisor of num_attention_heads";
            return Err(fields.invalid("num_key_value_heads", found, expected));
        }
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(fields.invalid("head_dim", format!("{head_dim}"), "an even number"));
        }
        let vocab_size = fields.size("vocab_size", MAX_VOCAB)?;
        let (rope_theta, rope_scaling) = fields.rope()?;
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
            rope_theta,
            rope_scaling,
            attention_bias: match architecture {
                Architecture::Qwen2 => true,
                Architecture::Qwen3 | Architecture::Llama => fields.flag("attention_bias")?,
            },
            tied_embeddings: fields.flag("tie_word_embeddings")?,
            eos_tokens: fields.eos_tokens(vocab_size)?,
            initializer_range: fields.number_or("initializer_range", 0.02)?,
        })
    }

    pub fn has_bias(&self, module: Module) -> bool {
        let possible = match module {
            Module::Query | Module::Key | Module::Value => true,
            Module::Output => self.architecture != Architecture::Qwen2,
            Module::Gate | Module::Up | Module::Down => false,
        };
        possible && self.attention_bias
    }

    /// Heads of q and k are normalised, each kind by weights of its own.
    pub fn has_head_norms(&self) -> bool {
        self.architecture == Architecture::Qwen3
    }

    /// Of the largest model that this type can describe it does not overflow.
    pub fn parameter_count(&self) -> u128 {
        let wide = |n: usize| n as u128;
        let of_module = |module: Module| {
            let (outputs, inputs) = module.shape(self);
            let bias = if self.has_bias(module) { wide(outputs) } else { 0 };
            wide(outputs) * wide(inputs) + bias
        };
        let head_norms = if self.has_head_norms() { 2 * wide(self.head_dim) } else { 0 };
        let layer: u128 = Module::ALL.into_iter().map(of_module).sum();
        let tables = if self.tied_embeddings { 1 } else { 2 };
        wide(self.layers) * (layer + 2 * wide(self.hidden_size) + head_norms)
            + (tables * wide(self.vocab_size) + 1) * wide(self.hidden_size)
    }

    /// What transformers needs to load the model.
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
            "architectures": [self.architecture.class()],
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

/// What transformers assumes of a Qwen3 whose file does not say.
const QWEN3_HEAD_DIM: usize = 128;

#[cfg(test)]
mod tests;
