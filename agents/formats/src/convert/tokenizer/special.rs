//! What a tokenizer puts around texts, which tokens end them, and how a chat is written.

use std::path::Path;

use serde_json::{Value as Json, json};

use super::{Fields, read_json, read_text};
use crate::convert::ConvertError;
use crate::gguf::Value;

/// What Hugging Face calls a token, and what llama.cpp calls its id.
const TOKENS: [(&str, &str); 5] = [
    ("bos", "ggml.bos_token_id"),
    ("eos", "ggml.eos_token_id"),
    ("unk", "ggml.unknown_token_id"),
    ("sep", "ggml.seperator_token_id"),
    ("pad", "ggml.padding_token_id"),
];

pub(super) fn fields(
    dir: &Path,
    tokenizer: &Json,
    vocab_size: usize,
) -> Result<Fields, ConvertError> {
    let model = read_json(&dir.join("config.json"))?;
    let config = dir.join("tokenizer_config.json");
    let config = if config.exists() { read_json(&config)? } else { json!({}) };
    let mut fields = Vec::new();
    for (name, field) in TOKENS {
        let id = id_of(tokenizer, &config[format!("{name}_token")])
            .or_else(|| model[format!("{name}_token_id")].as_u64());
        if let Some(id) = id.filter(|id| *id < vocab_size as u64) {
            fields.push((field, Value::U32(id as u32)));
        }
    }
    let around = Around::of(tokenizer, &config);
    fields.push(("ggml.add_bos_token", Value::Bool(around.bos)));
    fields.push(("ggml.add_eos_token", Value::Bool(around.eos)));
    if let Some(template) = chat_template(dir, &config)? {
        fields.push(("chat_template", Value::String(template)));
    }
    Ok(fields)
}

fn content(token: &Json) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

fn id_of(tokenizer: &Json, token: &Json) -> Option<u64> {
    let text = content(token)?;
    let added = tokenizer["added_tokens"].as_array()?;
    added.iter().find(|added| added["content"] == text)?["id"].as_u64()
}

/// What is put around a text.
struct Around {
    bos: bool,
    eos: bool,
}

impl Around {
    /// As `tokenizer.json` does it, unless the configuration says otherwise: loading it rebuilds
    /// that step.
    fn of(tokenizer: &Json, config: &Json) -> Self {
        let template = template(&tokenizer["post_processor"]);
        let special = |step: Option<&Json>| Some(step?["SpecialToken"]["id"].as_str()?.to_owned());
        let (first, last) = (special(template.first()), special(template.last()));
        let is = |token: Option<String>, name: &str| {
            token.is_some() && token.as_deref() == content(&config[name])
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

/// Of a single text; empty when nothing is put around it.
fn template(post_processor: &Json) -> &[Json] {
    let one = std::slice::from_ref(post_processor);
    let steps = post_processor["processors"].as_array().map_or(one, Vec::as_slice);
    let step = steps.iter().find(|step| step["type"] == "TemplateProcessing");
    step.and_then(|step| step["single"].as_array()).map_or(&[], Vec::as_slice)
}

/// A file of its own wins over the configuration; of several, the one called `default`.
fn chat_template(dir: &Path, config: &Json) -> Result<Option<String>, ConvertError> {
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
