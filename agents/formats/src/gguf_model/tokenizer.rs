//! Builds the `tokenizer.json` of a byte-level BPE tokenizer from the fields of a GGUF file.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::GgufModelError;
use crate::ModelConfig;
use crate::convert::{SPECIAL_TOKENS, pre_tokenizer_json, token_kind as kind};
use crate::gguf::{GgufFile, GgufValue};

pub(super) fn build_tokenizer(
    file: &GgufFile,
    config: &ModelConfig,
) -> Result<Json, GgufModelError> {
    let refuse =
        |field, what: String| GgufModelError::Field { path: file.file_path().into(), field, what };
    let text = |name: &'static str| file.find_field(name).and_then(GgufValue::as_str);
    match text("tokenizer.ggml.model") {
        Some("gpt2") => {}
        other => {
            let what = format!(
                "is {}; only gpt2 (byte-level BPE) is read here: use the Hugging Face directory, \
                 or llama.cpp (--engine llama.cpp)",
                other.unwrap_or("missing")
            );
            return Err(refuse("tokenizer.ggml.model", what));
        }
    }
    let pre = text("tokenizer.ggml.pre").unwrap_or("missing");
    let Some((pre_tokenizer, ignore_merges)) = pre_tokenizer_json(pre) else {
        let what = format!("is {pre}, which is not known here; use the Hugging Face directory");
        return Err(refuse("tokenizer.ggml.pre", what));
    };
    let strings = |name: &'static str| {
        let texts = file.find_field(name).and_then(GgufValue::as_strings);
        texts.ok_or_else(|| refuse(name, "is missing".into()))
    };
    let tokens = strings("tokenizer.ggml.tokens")?;
    let kinds = file.find_field("tokenizer.ggml.token_type").and_then(GgufValue::as_i32s);
    let kinds = kinds.filter(|kinds| kinds.len() == tokens.len());
    let Some(kinds) = kinds.filter(|kinds| kinds.len() <= config.vocab_size) else {
        let what =
            "has a different length than the tokens, or more entries than the model has".into();
        return Err(refuse("tokenizer.ggml.token_type", what));
    };
    let (vocab, added) = build_vocab(tokens, kinds);
    let merges: Option<Vec<Json>> =
        strings("tokenizer.ggml.merges")?.iter().map(|line| parse_merge(line)).collect();
    let merges = merges
        .ok_or_else(|| refuse("tokenizer.ggml.merges", "has an entry that is not a pair".into()))?;
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": pre_tokenizer,
        "post_processor": build_post_processor(file, tokens),
        "decoder": byte_level_step(),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "byte_fallback": false,
            "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges,
        },
    }))
}

/// Returns the texts of the special tokens by Hugging Face's names, such as `bos_token`.
pub(super) fn special_tokens(file: &GgufFile) -> BTreeMap<String, String> {
    let tokens = file.find_field("tokenizer.ggml.tokens").and_then(GgufValue::as_strings);
    let tokens = tokens.unwrap_or_default();
    let find = |(name, field): (&str, &str)| {
        let id = file.find_field(&format!("tokenizer.{field}")).and_then(GgufValue::as_u64)?;
        let text = tokens.get(usize::try_from(id).ok()?)?;
        Some((format!("{name}_token"), text.clone()))
    };
    SPECIAL_TOKENS.into_iter().filter_map(find).collect()
}

/// Puts added tokens into both, because their ids follow from the vocabulary.
fn build_vocab(tokens: &[String], kinds: &[i32]) -> (Map<String, Json>, Vec<Json>) {
    let (mut vocab, mut added) = (Map::new(), Vec::new());
    for (id, (text, token_kind)) in tokens.iter().zip(kinds).enumerate() {
        if *token_kind == kind::UNUSED {
            continue;
        }
        vocab.insert(text.clone(), json!(id));
        if matches!(*token_kind, kind::CONTROL | kind::USER_DEFINED) {
            added.push(json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": *token_kind == kind::CONTROL,
            }));
        }
    }
    (vocab, added)
}

/// Splits a line at the space between its two tokens.
fn parse_merge(line: &str) -> Option<Json> {
    // The tokens contain no space: the byte level replaces it with another character.
    let (left, right) = line.split_once(' ')?;
    Some(json!([left, right]))
}

/// Returns the step that changes no text by itself.
fn byte_level_step() -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false})
}

/// Adds the begin-of-text token if the file requires it.
fn build_post_processor(file: &GgufFile, tokens: &[String]) -> Json {
    let wanted = file.find_field("tokenizer.ggml.add_bos_token").and_then(GgufValue::as_bool);
    let id = file.find_field("tokenizer.ggml.bos_token_id").and_then(GgufValue::as_u64);
    let token = id.and_then(|id| Some((id, tokens.get(usize::try_from(id).ok()?)?)));
    match token.filter(|_| wanted == Some(true)) {
        None => byte_level_step(),
        Some((id, text)) => {
            let bos = json!({"SpecialToken": {"id": text, "type_id": 0}});
            let sequence = |id: &str, kind: u32| json!({"Sequence": {"id": id, "type_id": kind}});
            json!({
                "type": "TemplateProcessing",
                "single": [bos, sequence("A", 0)],
                "pair": [bos, sequence("A", 0), bos, sequence("B", 1)],
                "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]}},
            })
        }
    }
}
