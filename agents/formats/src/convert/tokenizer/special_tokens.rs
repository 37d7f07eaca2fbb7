//! Special tokens and the chat template: tokens added around texts, tokens that end them, and the
//! format of a chat.

use std::path::Path;

use serde_json::{Value as Json, json};

use super::{GgufFields, read_json, read_text};
use crate::convert::ConvertError;
use crate::gguf::GgufValue;

/// Hugging Face's names of special tokens and llama.cpp's fields for their ids. The misspelling of
/// `seperator` is llama.cpp's.
pub(crate) const SPECIAL_TOKENS: [(&str, &str); 5] = [
    ("bos", "ggml.bos_token_id"),
    ("eos", "ggml.eos_token_id"),
    ("unk", "ggml.unknown_token_id"),
    ("sep", "ggml.seperator_token_id"),
    ("pad", "ggml.padding_token_id"),
];

pub(super) fn special_token_fields(
    dir: &Path,
    tokenizer: &Json,
    vocab_size: usize,
) -> Result<GgufFields, ConvertError> {
    let model = read_json(&dir.join("config.json"))?;
    let config = dir.join("tokenizer_config.json");
    let config = if config.exists() { read_json(&config)? } else { json!({}) };
    let mut fields = Vec::new();
    for (name, field) in SPECIAL_TOKENS {
        let id = find_token_id(tokenizer, &config[format!("{name}_token")])
            .or_else(|| model[format!("{name}_token_id")].as_u64());
        if let Some(id) = id.filter(|id| *id < vocab_size as u64) {
            fields.push((field, GgufValue::U32(id as u32)));
        }
    }
    let around = BoundaryTokens::from_settings(tokenizer, &config);
    fields.push(("ggml.add_bos_token", GgufValue::Bool(around.bos)));
    fields.push(("ggml.add_eos_token", GgufValue::Bool(around.eos)));
    if let Some(template) = read_chat_template(dir, &config)? {
        fields.push(("chat_template", GgufValue::String(template)));
    }
    Ok(fields)
}

/// Expects a string or an object with `content`.
fn token_text(token: &Json) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

fn find_token_id(tokenizer: &Json, token: &Json) -> Option<u64> {
    let text = token_text(token)?;
    let added = tokenizer["added_tokens"].as_array()?;
    added.iter().find(|added| added["content"] == text)?["id"].as_u64()
}

/// The tokens added before and after a text.
struct BoundaryTokens {
    bos: bool,
    eos: bool,
}

impl BoundaryTokens {
    /// Derives them from the post-processor. `add_bos_token` and `add_eos_token` in the
    /// configuration take precedence, because loading a tokenizer with them rebuilds the
    /// post-processor.
    fn from_settings(tokenizer: &Json, config: &Json) -> Self {
        let template = single_template(&tokenizer["post_processor"]);
        let special = |step: Option<&Json>| Some(step?["SpecialToken"]["id"].as_str()?.to_owned());
        let (first, last) = (special(template.first()), special(template.last()));
        let is = |token: Option<String>, name: &str| {
            token.is_some() && token.as_deref() == token_text(&config[name])
        };
        let bos =
            if config["bos_token"].is_null() { first.is_some() } else { is(first, "bos_token") };
        let eos = is(last, "eos_token");
        Self {
            bos: config["add_bos_token"].as_bool().unwrap_or(bos),
            eos: config["add_eos_token"].as_bool().unwrap_or(eos),
        }
    }
}

/// Returns the template for a single text; empty if nothing is added.
fn single_template(post_processor: &Json) -> &[Json] {
    let one = std::slice::from_ref(post_processor);
    let steps = post_processor["processors"].as_array().map_or(one, Vec::as_slice);
    let step = steps.iter().find(|step| step["type"] == "TemplateProcessing");
    step.and_then(|step| step["single"].as_array()).map_or(&[], Vec::as_slice)
}

/// Reads `chat_template.jinja`, otherwise the configuration's template or, of several, the one
/// named `default`.
fn read_chat_template(dir: &Path, config: &Json) -> Result<Option<String>, ConvertError> {
    let file = dir.join("chat_template.jinja");
    if file.exists() {
        return read_text(&file).map(Some);
    }
    let template = &config["chat_template"];
    let named = template.as_array().map_or(&[] as &[_], Vec::as_slice);
    let default = named.iter().find(|entry| entry["name"] == "default").or(named.first());
    let text = default.map_or(template, |entry| &entry["template"]);
    Ok(text.as_str().map(str::to_owned))
}
