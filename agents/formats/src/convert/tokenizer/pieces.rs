//! SentencePiece's way of BPE as Llama 2 has it, which llama.cpp calls `llama`: it knows no
//! merges but a score for each token, and joins what gives the highest. A merge's rank is that
//! score, as long as every pair that makes a token is a merge.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value as Json, json};

use super::{Fields, Tokens, kind};
use crate::gguf::{Array, Value};

/// Of tokens that nothing is joined to, as llama.cpp's converter has it.
const NEVER: f32 = -1000.0;

pub(super) fn fields(json: &Json, mut tokens: Tokens) -> Result<Fields, String> {
    let prefix = prefix(json)?;
    let merges = super::merges(json)?;
    let ranks = ranks(&merges)?;
    check_all_pairs(&merges, &tokens)?;
    let unknown = json["model"]["unk_token"].as_str();
    let mut scores = Vec::with_capacity(tokens.texts.len());
    for (text, token_kind) in tokens.texts.iter().zip(&mut tokens.kinds) {
        if is_byte(text) && *token_kind == kind::NORMAL {
            *token_kind = kind::BYTE;
        } else if Some(text.as_str()) == unknown {
            *token_kind = kind::UNKNOWN;
        }
        let rank = ranks.get(text.as_str()).filter(|_| *token_kind == kind::NORMAL);
        scores.push(rank.map_or(NEVER, |rank| -(*rank as f32)));
    }
    // Letters are joined from; they have no rank, and no score that counts.
    let mut fields = vec![
        ("ggml.model", Value::from("llama")),
        ("ggml.pre", Value::from("default")),
        ("ggml.add_space_prefix", Value::Bool(prefix)),
        ("ggml.scores", Value::Array(Array::F32(scores))),
    ];
    fields.extend(tokens.fields());
    Ok(fields)
}

/// `<0x0A>`
fn is_byte(text: &str) -> bool {
    let hex = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    hex.is_some_and(|hex| hex.len() == 2 && u8::from_str_radix(hex, 16).is_ok())
}

/// Whether text is begun with a space. Anything else that is done to it is refused.
fn prefix(json: &Json) -> Result<bool, String> {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let normalizer = &json["normalizer"];
    let one = std::slice::from_ref(normalizer);
    let steps = normalizer["normalizers"].as_array().map_or(one, Vec::as_slice);
    let pre_tokenizer = &json["pre_tokenizer"];
    match (steps, pre_tokenizer["type"].as_str()) {
        ([first, second], None) if first["type"] == "Prepend" && *second == replace => {
            Ok(first["prepend"] == "▁")
        }
        ([only], None) if *only == replace => Ok(false),
        ([Json::Null], Some("Metaspace")) if is_metaspace(pre_tokenizer) => {
            Ok(pre_tokenizer["prepend_scheme"] != "never")
        }
        _ => Err(format!(
            "normalizer {normalizer} with pre_tokenizer {pre_tokenizer} is not what \
             SentencePiece's tokenizers do; convert the model with llama.cpp's own converter if \
             that knows it"
        )),
    }
}

fn is_metaspace(step: &Json) -> bool {
    step["replacement"] == "▁" && step["split"] != true
}

/// Of the texts that merges make. A token's merges stand together, or its rank would be several.
fn ranks(merges: &[[String; 2]]) -> Result<BTreeMap<String, usize>, String> {
    let mut ranks = BTreeMap::new();
    let mut last = String::new();
    for [left, right] in merges {
        let text = format!("{left}{right}");
        let rank = ranks.len();
        if text != last && ranks.insert(text.clone(), rank).is_some() {
            return Err(format!(
                "model.merges make `{text}` at different ranks, which llama.cpp's scores cannot say"
            ));
        }
        last = text;
    }
    Ok(ranks)
}

/// llama.cpp joins any two tokens that make a third.
fn check_all_pairs(merges: &[[String; 2]], tokens: &Tokens) -> Result<(), String> {
    let normal = tokens.texts.iter().zip(&tokens.kinds).filter(|(_, kind)| **kind == kind::NORMAL);
    let known: BTreeSet<&str> = normal.map(|(text, _)| text.as_str()).collect();
    let merges: BTreeSet<(&str, &str)> =
        merges.iter().map(|[left, right]| (left.as_str(), right.as_str())).collect();
    for text in known.iter().filter(|text| !is_byte(text)) {
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if known.contains(left) && known.contains(right) && !merges.contains(&(left, right)) {
                return Err(format!(
                    "model.merges do not make `{text}` of `{left}` and `{right}`, but llama.cpp \
                     would; convert the model with llama.cpp's own converter"
                ));
            }
        }
    }
    Ok(())
}
