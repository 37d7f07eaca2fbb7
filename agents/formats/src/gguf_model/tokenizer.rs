//! A byte-level BPE tokenizer, back from the fields of a GGUF file.

use serde_json::{Map, Value as Json, json};

use super::GgufModelError;
use crate::Config;
use crate::convert::pre_tokenizer;
use crate::convert::token_kind as kind;
use crate::gguf::{File, Value};

pub(super) fn json(file: &File, config: &Config) -> Result<Json, GgufModelError> {
    let refuse =
        |field, what: String| GgufModelError::Field { path: file.path().into(), field, what };
    let text = |name: &'static str| file.field(name).and_then(Value::as_str);
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
    let Some((pre_tokenizer, ignore_merges)) = pre_tokenizer(pre) else {
        let what = format!("is {pre}, which is not known here; use the Hugging Face directory");
        return Err(refuse("tokenizer.ggml.pre", what));
    };
    let strings = |name: &'static str| {
        let texts = file.field(name).and_then(Value::as_strings);
        texts.ok_or_else(|| refuse(name, "is missing".into()))
    };
    let tokens = strings("tokenizer.ggml.tokens")?;
    let kinds = file.field("tokenizer.ggml.token_type").and_then(Value::as_i32s);
    let kinds = kinds.filter(|kinds| kinds.len() == tokens.len());
    let Some(kinds) = kinds.filter(|kinds| kinds.len() <= config.vocab_size) else {
        let what = "has another length than the tokens, or more than the model has".into();
        return Err(refuse("tokenizer.ggml.token_type", what));
    };
    let (vocab, added) = vocab(tokens, kinds);
    let merges: Option<Vec<Json>> =
        strings("tokenizer.ggml.merges")?.iter().map(|line| merge(line)).collect();
    let merges = merges
        .ok_or_else(|| refuse("tokenizer.ggml.merges", "has an entry that is no pair".into()))?;
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(file, tokens),
        "decoder": byte_level(),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "byte_fallback": false,
            "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges,
        },
    }))
}

/// Added tokens are in both: their ids follow from the vocabulary.
fn vocab(tokens: &[String], kinds: &[i32]) -> (Map<String, Json>, Vec<Json>) {
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

fn merge(line: &str) -> Option<Json> {
    // The first letter may be a space's stand-in, never a space.
    let (left, right) = line.split_once(' ')?;
    Some(json!([left, right]))
}

fn byte_level() -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false})
}

fn post_processor(file: &File, tokens: &[String]) -> Json {
    let wanted = file.field("tokenizer.ggml.add_bos_token").and_then(Value::as_bool);
    let id = file.field("tokenizer.ggml.bos_token_id").and_then(Value::as_u64);
    let token = id.and_then(|id| Some((id, tokens.get(usize::try_from(id).ok()?)?)));
    match token.filter(|_| wanted == Some(true)) {
        None => byte_level(),
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
