//! Writes the directory of a model that does not exist yet: a byte-level tokenizer and the
//! configuration of a small Qwen2, for `LanguageModel::init_random` to fill with random weights.

use formats::{Architecture, ArchitectureDetails, ModelConfig};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The shape of a small Qwen2. The default is the demo's, with 0.77 M parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScratchShape {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub max_positions: usize,
}

impl Default for ScratchShape {
    fn default() -> Self {
        Self {
            hidden_size: 128,
            intermediate_size: 352,
            layers: 4,
            heads: 4,
            kv_heads: 2,
            max_positions: 512,
        }
    }
}

/// The reason why the directory cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    #[error("could not write {path}")]
    Write { path: PathBuf, source: std::io::Error },
    #[error("could not describe {path} as JSON (X101)")]
    Json { path: PathBuf, source: serde_json::Error },
}

/// Also the id of the end token, the first special token.
const BYTES: u32 = 256;
/// These follow the byte tokens.
const SPECIAL_TOKENS: [&str; 4] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"];

/// Writes `config.json`, `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`
/// into `dir`, and returns the configuration.
pub fn write_scratch_model(dir: &Path, shape: &ScratchShape) -> Result<ModelConfig, ScratchError> {
    std::fs::create_dir_all(dir)
        .map_err(|source| ScratchError::Write { path: dir.into(), source })?;
    let config = scratch_config(shape);
    write_json(&dir.join("config.json"), &config.to_json())?;
    write_json(&dir.join("tokenizer.json"), &byte_tokenizer())?;
    write_json(&dir.join("tokenizer_config.json"), &tokenizer_config(shape.max_positions))?;
    write_json(&dir.join("generation_config.json"), &json!({"eos_token_id": BYTES}))?;
    Ok(config)
}

fn scratch_config(shape: &ScratchShape) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Qwen2,
        vocab_size: BYTES as usize + SPECIAL_TOKENS.len(),
        hidden_size: shape.hidden_size,
        intermediate_size: shape.intermediate_size,
        layers: shape.layers,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.hidden_size / shape.heads.max(1),
        max_positions: shape.max_positions,
        norm_epsilon: 1e-6,
        rope_theta: 1e4,
        rope_scaling: None,
        attention_bias: true,
        tied_embeddings: true,
        eos_tokens: vec![BYTES],
        // Hugging Face's 0.02 suits widths around 2 500; a narrow model hardly learns with it.
        initializer_range: 1.0 / (shape.hidden_size.max(1) as f64).sqrt(),
        details: ArchitectureDetails::default(),
    }
}

/// Returns a BPE tokenizer without merges: one token a byte, in the ByteLevel alphabet.
fn byte_tokenizer() -> Value {
    let mut vocab: Map<String, Value> =
        byte_alphabet().zip(0u32..).map(|(name, id)| (name.to_string(), json!(id))).collect();
    let mut added = Vec::new();
    for (name, id) in SPECIAL_TOKENS.into_iter().zip(BYTES..) {
        vocab.insert(name.into(), json!(id));
        added.push(json!({
            "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }));
    }
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": [],
        },
    })
}

/// Yields the printable character of each byte, 0 to 255, in GPT-2's byte-level alphabet.
fn byte_alphabet() -> impl Iterator<Item = char> {
    let mut stand_ins = (256..).filter_map(char::from_u32);
    (0..=255u8).filter_map(move |byte| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => Some(char::from(byte)),
        _ => stand_ins.next(),
    })
}

fn tokenizer_config(max_positions: usize) -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": false,
        "add_prefix_space": false, "bos_token": null, "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[3], "unk_token": null,
        "clean_up_tokenization_spaces": false, "model_max_length": max_positions,
    })
}

fn write_json(path: &Path, value: &Value) -> Result<(), ScratchError> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|source| ScratchError::Json { path: path.into(), source })?;
    std::fs::write(path, text + "\n")
        .map_err(|source| ScratchError::Write { path: path.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::ModelTokenizer;

    #[test]
    fn every_text_survives_the_byte_tokenizer() {
        let dir = tempfile::tempdir().unwrap();
        let config = write_scratch_model(dir.path(), &ScratchShape::default()).unwrap();
        assert_eq!(ModelConfig::from_dir(dir.path()).unwrap(), config);
        let tokenizer = ModelTokenizer::load_tokenizer(dir.path()).unwrap();
        let text: String = (0..0x500).filter_map(char::from_u32).collect::<String>() + "  €😀\r\n";
        let tokens = tokenizer.encode_prompt(&text).unwrap();
        let bytes: Vec<u8> = tokens.iter().map(|token| *token as u8).collect();
        assert_eq!(bytes, text.as_bytes(), "a token's id is its byte");
        assert_eq!(tokenizer.decode_tokens(&tokens).unwrap(), text);
        assert_eq!(tokenizer.encode_prompt("<|endoftext|>").unwrap(), [BYTES]);
        assert_eq!(tokenizer.encode_plain("<|endoftext|>").unwrap().tokens.len(), 13);
    }
}
