//! The part of a `config.json` that is needed of every causal language model, also of one outside of
//! the table of architectures: what bounds its texts, and its size.

use std::path::Path;

use serde_json::{Map, Value};

use crate::config::fields::{
    ConfigFields, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, read_object,
};
use crate::config::{complete_end_tokens, not_embedded_error, replace_upstream_settings};
use crate::memory_estimate::ModelShape;
use crate::{Architecture, ModelConfig, ModelConfigError};

/// The positions of a model whose files name none.
const USUAL_POSITIONS: usize = 2048;
const MAX_EXPERTS: usize = 1 << 12;

/// A causal language model, as far as it must be known to train it with PyTorch and to run it with
/// llama.cpp.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelOutline {
    /// The `model_type`; with the setting that the table lacks, if that is why there is no `config`.
    pub model_type: String,
    pub vocab_size: usize,
    pub max_positions: usize,
    /// The tokens that end generation, the one of training first.
    pub eos_tokens: Vec<u32>,
    /// Exact for a model of the table, otherwise estimated from the numbers of its `config.json`.
    pub shape: ModelShape,
    /// `None` for a model outside of the table, or with settings that the table lacks, which only
    /// PyTorch trains and only llama.cpp's own converters convert.
    pub config: Option<ModelConfig>,
}

/// The bounds of a model's texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenLimits<'a> {
    pub vocab_size: usize,
    pub max_positions: usize,
    pub eos_tokens: &'a [u32],
}

impl<'a> From<&'a ModelConfig> for TokenLimits<'a> {
    fn from(config: &'a ModelConfig) -> Self {
        let ModelConfig { vocab_size, max_positions, .. } = *config;
        Self { vocab_size, max_positions, eos_tokens: &config.eos_tokens }
    }
}

impl<'a> From<&'a ModelOutline> for TokenLimits<'a> {
    fn from(outline: &'a ModelOutline) -> Self {
        let ModelOutline { vocab_size, max_positions, .. } = *outline;
        Self { vocab_size, max_positions, eos_tokens: &outline.eos_tokens }
    }
}

impl From<ModelConfig> for ModelOutline {
    fn from(config: ModelConfig) -> Self {
        Self {
            model_type: config.architecture.model_type().to_owned(),
            vocab_size: config.vocab_size,
            max_positions: config.max_positions,
            eos_tokens: config.eos_tokens.clone(),
            shape: ModelShape::from_config(&config),
            config: Some(config),
        }
    }
}

impl ModelOutline {
    /// Reads `config.json` of a model directory, and the small files that add to it. Code of the
    /// directory is refused, because it is never run.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelConfigError> {
        let path = dir.join("config.json");
        let map = read_object(&path)?;
        let map = ConfigFields { map: &map, path: &path }.read_text_part()?;
        let fields = ConfigFields { map: &map, path: &path };
        let refused = match fields.find_architecture()? {
            None => None,
            Some(architecture) => match ModelConfig::from_dir(dir) {
                Ok(config) => return Ok(config.into()),
                Err(error) => Some((architecture, error)),
            },
        };
        let path = dir.join("tokenizer_config.json");
        let tokenizer = if path.exists() { read_object(&path)? } else { Map::new() };
        let settings = ConfigFields { map: &tokenizer, path: &path };
        let has_code = settings.get("auto_map").is_some();
        let mut outline = match refused {
            Some((_, error)) if has_code => return Err(error),
            Some((architecture, error)) => read_upstream_outline(&fields, architecture, error)?,
            None if has_code => {
                return Err(settings.unknown_model_error(fields.require_field("model_type")?));
            }
            None => read_other_outline(&fields, settings.get("model_max_length"))?,
        };
        outline.eos_tokens = complete_end_tokens(dir, outline.eos_tokens, outline.vocab_size)?;
        Ok(outline)
    }

    /// Parses the object of a `config.json`. `path` is only named in errors.
    pub fn from_json(map: &Map<String, Value>, path: &Path) -> Result<Self, ModelConfigError> {
        let map = ConfigFields { map, path }.read_text_part()?;
        let fields = ConfigFields { map: &map, path };
        match fields.find_architecture()? {
            Some(architecture) => match ModelConfig::from_json(&map, path) {
                Ok(config) => Ok(config.into()),
                Err(error) => read_upstream_outline(&fields, architecture, error),
            },
            None => read_other_outline(&fields, None),
        }
    }

    /// Checks that the embedded engine computes the model. `dir` is only named in errors.
    pub fn require_embedded(&self, dir: &Path) -> Result<(), ModelConfigError> {
        match &self.config {
            Some(config) => config.require_embedded(dir),
            None => Err(not_embedded_error(dir, &self.model_type)),
        }
    }
}

/// Reads a model of the table with settings that only PyTorch and llama.cpp's converters compute.
/// Returns `error`, the reason why the table excludes it, if something else excludes it as well.
fn read_upstream_outline(
    fields: &ConfigFields<'_>,
    architecture: Architecture,
    error: ModelConfigError,
) -> Result<ModelOutline, ModelConfigError> {
    let usual = replace_upstream_settings(fields.map, architecture);
    let Ok(config) = ModelConfig::from_json(&usual, fields.path) else { return Err(error) };
    let Ok(name) = fields.read_other_model() else { return Err(error) };
    match error {
        ModelConfigError::Unsupported { field, found, .. } => {
            let model_type = format!("{name} ({field} {found})");
            Ok(ModelOutline { model_type, config: None, ..ModelOutline::from(config) })
        }
        other => Err(other),
    }
}

/// Reads a model outside of the table. `text_max` is the longest text of its tokenizer, in tokens.
fn read_other_outline(
    fields: &ConfigFields<'_>,
    text_max: Option<&Value>,
) -> Result<ModelOutline, ModelConfigError> {
    let model_type = fields.read_other_model()?;
    let vocab_size = read_first(fields, &["vocab_size", "padded_vocab_size"], MAX_VOCAB)?;
    let hidden = read_first(fields, &["hidden_size", "n_embd", "d_model"], MAX_WIDTH)?;
    let layers = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
    let layers = read_first(fields, &layers, MAX_LAYERS)?;
    let optional = |names: &[&'static str], most: usize, usual: usize| match names
        .iter()
        .find(|name| fields.get(name).is_some_and(Value::is_number))
    {
        Some(name) => fields.read_size(name, most),
        None => Ok(usual),
    };
    let text_max = text_max.and_then(Value::as_u64).and_then(|most| usize::try_from(most).ok());
    let text_max = text_max.filter(|most| (1..=MAX_POSITIONS).contains(most));
    let positions =
        ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"];
    let max_positions = optional(&positions, MAX_POSITIONS, text_max.unwrap_or(USUAL_POSITIONS))?;
    let widths = ["intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"];
    let intermediate = optional(&widths, MAX_WIDTH * 4, hidden.saturating_mul(4))?;
    let heads = optional(&["num_attention_heads", "n_head", "n_heads"], MAX_HEADS, 1)?;
    let kv_heads = optional(&["num_key_value_heads", "num_kv_heads"], MAX_HEADS, heads)?;
    let head_dim = optional(&["head_dim"], MAX_WIDTH, (hidden / heads).max(1))?;
    let experts =
        optional(&["num_experts", "num_local_experts", "n_routed_experts"], MAX_EXPERTS, 0)?;
    let width = optional(&["moe_intermediate_size"], MAX_WIDTH, intermediate)?;
    let wide = |size: usize| size as u64;
    let of_experts = [3, layers, hidden, experts, width].map(wide);
    let expert_parameters = of_experts.into_iter().fold(1, u64::saturating_mul);
    let shape = ModelShape {
        layers: wide(layers),
        hidden: wide(hidden),
        intermediate: wide(intermediate),
        heads: wide(heads),
        kv_heads: wide(kv_heads),
        head_dim: wide(head_dim),
        vocab: wide(vocab_size),
        tied: fields.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false),
        qkv_bias: false,
        qk_norm: false,
        other_parameters: expert_parameters,
        expert_parameters,
    };
    let eos_tokens = fields.read_eos_tokens(vocab_size)?;
    Ok(ModelOutline { model_type, vocab_size, max_positions, eos_tokens, shape, config: None })
}

/// Reads the first of these fields that is there; an error names the first.
fn read_first(
    fields: &ConfigFields<'_>,
    names: &[&'static str],
    most: usize,
) -> Result<usize, ModelConfigError> {
    let there = names.iter().find(|name| fields.get(name).is_some());
    fields.read_size(there.unwrap_or(&names[0]), most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn write(dir: &Path, name: &str, content: &Value) {
        std::fs::write(dir.join(name), content.to_string()).unwrap();
    }

    fn neox() -> Value {
        json!({
            "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "vocab_size": 260,
            "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
            "max_position_embeddings": 512, "eos_token_id": 0,
        })
    }

    fn outline(change: &Value) -> Result<ModelOutline, ModelConfigError> {
        let mut config = neox();
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        ModelOutline::from_json(config.as_object().unwrap(), Path::new("config.json"))
    }

    #[test]
    fn models_outside_of_the_table_are_read_by_any_of_their_names() {
        let read = outline(&json!({})).unwrap();
        assert_eq!((read.vocab_size, read.max_positions), (260, 512));
        assert_eq!((read.eos_tokens.as_slice(), read.config.is_none()), (&[0][..], true));
        assert_eq!((read.shape.intermediate, read.shape.head_dim), (512, 32));
        let gpt2 = json!({
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 260,
            "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": null,
            "eos_token_id": 0,
        });
        let gpt2 = ModelOutline::from_json(gpt2.as_object().unwrap(), Path::new("")).unwrap();
        assert_eq!(gpt2.shape, read.shape);
        assert_eq!(gpt2.max_positions, 512);
        let error = gpt2.require_embedded(Path::new("d")).unwrap_err().to_string();
        assert!(error.contains("models of gpt2, only of qwen2"), "{error}");
        let mixture = outline(&json!({"num_experts": 8, "moe_intermediate_size": 16})).unwrap();
        assert_eq!(mixture.shape.expert_parameters, 3 * 4 * 128 * 8 * 16);
    }

    #[test]
    fn models_of_the_table_keep_their_configuration() {
        let qwen = json!({
            "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "intermediate_size": 352,
            "rope_theta": 5e5,
        });
        let read = outline(&qwen).unwrap();
        let config = read.config.clone().unwrap();
        assert_eq!((read.model_type.as_str(), read.vocab_size), ("qwen2", config.vocab_size));
        let window = outline(&json!({"model_type": "llama", "use_sliding_window": true}));
        assert!(window.is_err(), "its own settings are still checked");
    }

    /// Reads a Llama with other settings.
    fn llama(change: Value) -> Result<ModelOutline, ModelConfigError> {
        let mut config = json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 352,
        });
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        outline(&config)
    }

    #[test]
    fn settings_that_only_the_table_lacks_are_left_to_the_converters() {
        let yarn = json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
        });
        let plain = llama(json!({})).unwrap();
        for (change, kind) in [
            (json!({"rope_scaling": {"type": "linear", "factor": 4.0}}), "rope_scaling linear"),
            (json!({ "rope_parameters": yarn }), "rope_parameters yarn"),
            (json!({"mlp_bias": true, "attention_bias": true}), "mlp_bias true"),
        ] {
            let read = llama(change).unwrap();
            assert_eq!(read.model_type, format!("llama ({kind})"));
            assert_eq!(read.config, None);
            assert_eq!((read.shape.layers, read.max_positions), (4, plain.max_positions));
            let error = read.require_embedded(Path::new("d")).unwrap_err().to_string();
            assert!(error.contains(kind) && error.contains("--trainer-engine pytorch"), "{error}");
        }
    }

    #[test]
    fn settings_that_the_converters_ignore_are_refused_also_beside_others() {
        let with_bias = |other: Value| {
            let mut change = json!({"mlp_bias": true});
            change.as_object_mut().unwrap().extend(other.as_object().unwrap().clone());
            change
        };
        let scaled = |scaling: Value| json!({ "rope_scaling": scaling });
        for (change, expected) in [
            (with_bias(json!({"use_sliding_window": true})), "mlp_bias"),
            (with_bias(json!({"quantization_config": {"quant_method": "gptq"}})), "mlp_bias"),
            (with_bias(json!({"auto_map": {"AutoConfig": "own.Config"}})), "mlp_bias"),
            (with_bias(json!({"hidden_size": -1})), "mlp_bias"),
            (scaled(json!({"type": "dynamic", "factor": 2.0})), "dynamic"),
            (scaled(json!({"type": "linear"})), "linear"),
            (scaled(json!({"type": "yarn", "factor": 4.0})), "yarn"),
            (
                scaled(json!({
                    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
                    "attention_factor": 1.0,
                })),
                "yarn",
            ),
            (json!({"hidden_act": "gelu"}), "gelu"),
        ] {
            let error = llama(change).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("(M104)"), "{error}");
        }
        let qwen = json!({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]});
        assert!(llama(with_bias(qwen)).is_err(), "llama.cpp loads no such bias of Qwen2");
    }

    #[test]
    fn a_directory_with_such_settings_has_its_end_tokens_and_no_code() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = neox();
        config.as_object_mut().unwrap().extend([
            ("model_type".to_owned(), json!("llama")),
            ("architectures".to_owned(), json!(["LlamaForCausalLM"])),
            ("intermediate_size".to_owned(), json!(352)),
            ("mlp_bias".to_owned(), json!(true)),
        ]);
        write(dir.path(), "config.json", &config);
        write(dir.path(), "generation_config.json", &json!({"eos_token_id": [0, 7]}));
        let read = ModelOutline::from_dir(dir.path()).unwrap();
        assert_eq!((read.eos_tokens.as_slice(), read.config), (&[0, 7][..], None));
        let code = json!({"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}});
        write(dir.path(), "tokenizer_config.json", &code);
        let error = ModelOutline::from_dir(dir.path()).unwrap_err().to_string();
        assert!(error.contains("mlp_bias"), "{error}");
    }

    #[test]
    fn code_quantised_weights_and_other_kinds_of_models_are_refused() {
        for (change, expected) in [
            (json!({"auto_map": {"AutoConfig": "own.Config"}}), "own.py"),
            (json!({"configuration_files": ["config.4.0.0.json"]}), "`[\"config.4.0.0.json\"]`"),
            (json!({"quantization_config": {"quant_method": "gptq"}}), "gptq"),
            (json!({"architectures": ["GPTNeoXForTokenClassification"]}), "use a model of"),
            (json!({"architectures": null}), "use a model of"),
            (json!({"model_type": "gemma3"}), "supported: Gemma3ForConditionalGeneration"),
            (
                json!({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}),
                "use a model of",
            ),
            (json!({"model_type": "a b"}), "use a model of"),
            (json!({"hidden_size": null}), "`hidden_size` is missing"),
            (json!({"vocab_size": 1e12}), "`vocab_size`"),
        ] {
            let error = outline(&change).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("(M104)"), "{error}");
        }
    }

    #[test]
    fn a_tokenizer_s_code_is_refused_and_its_length_bounds_the_positions() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = neox();
        config.as_object_mut().unwrap().remove("max_position_embeddings");
        write(dir.path(), "config.json", &config);
        let positions = || ModelOutline::from_dir(dir.path()).map(|it| it.max_positions);
        assert_eq!(positions().unwrap(), USUAL_POSITIONS);
        write(dir.path(), "tokenizer_config.json", &json!({"model_max_length": 1024}));
        assert_eq!(positions().unwrap(), 1024);
        write(dir.path(), "tokenizer_config.json", &json!({"model_max_length": 1e30}));
        assert_eq!(positions().unwrap(), USUAL_POSITIONS);
        let code = json!({"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}});
        write(dir.path(), "tokenizer_config.json", &code);
        let error = positions().unwrap_err().to_string();
        assert!(error.contains("tokenizer_config.json") && error.contains("own.py"), "{error}");
    }
}
