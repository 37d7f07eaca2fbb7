//! SentencePiece's BPE as in Llama 2 and Gemma, which llama.cpp calls `llama`. It has a score for each token
//! instead of merges, and joins the pair with the highest score. The negative rank of a token's
//! merge serves as its score. This is correct if every pair of tokens that forms a third one is a
//! merge.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value as Json, json};

use super::{GgufFields, TokenTable, kind};
use crate::gguf::{GgufArray, GgufValue};

/// For tokens that no merge produces, as in llama.cpp's converter.
const UNMERGED_SCORE: f32 = -1000.0;

pub(super) fn sentence_piece_fields(
    json: &Json,
    mut tokens: TokenTable,
) -> Result<GgufFields, String> {
    let prefix = adds_space_prefix(json)?;
    let merges = super::read_merges(json)?;
    let ranks = merge_ranks(&merges, &normal_texts(&tokens))?;
    check_all_pairs(&merges, &normal_texts(&tokens))?;
    let unknown = json["model"]["unk_token"].as_str();
    let mut scores = Vec::with_capacity(tokens.texts.len());
    for (text, token_kind) in tokens.texts.iter().zip(&mut tokens.kinds) {
        if is_byte_token(text) && *token_kind == kind::NORMAL {
            *token_kind = kind::BYTE;
        } else if Some(text.as_str()) == unknown {
            *token_kind = kind::UNKNOWN;
        }
        let rank = ranks.get(text.as_str()).filter(|_| *token_kind == kind::NORMAL);
        scores.push(rank.map_or(UNMERGED_SCORE, |rank| -(*rank as f32)));
    }
    // Single letters are what merges start from. They have no rank, and their score is never used.
    let mut fields = vec![
        ("ggml.model", GgufValue::from("llama")),
        ("ggml.pre", GgufValue::from("default")),
        ("ggml.add_space_prefix", GgufValue::Bool(prefix)),
        ("ggml.scores", GgufValue::Array(GgufArray::F32(scores))),
    ];
    fields.extend(tokens.into_fields());
    Ok(fields)
}

/// Returns true for a text such as `<0x0A>`.
fn is_byte_token(text: &str) -> bool {
    let hex = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    hex.is_some_and(|hex| hex.len() == 2 && u8::from_str_radix(hex, 16).is_ok())
}

/// Returns true if the tokenizer puts a space before the text. Fails if the normalizer or the
/// pre-tokenizer does anything else.
fn adds_space_prefix(json: &Json) -> Result<bool, String> {
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
        // Gemma's, which splits nothing: all spaces were replaced before.
        ([only], Some("Split"))
            if *only == replace && pre_tokenizer["pattern"] == json!({"String": " "}) =>
        {
            Ok(false)
        }
        ([Json::Null], Some("Metaspace")) if is_metaspace_step(pre_tokenizer) => {
            Ok(pre_tokenizer["prepend_scheme"] != "never")
        }
        _ => Err(format!(
            "normalizer {normalizer} with pre_tokenizer {pre_tokenizer} does not match \
             SentencePiece's tokenizers; convert the model with llama.cpp's own converter if that \
             knows it"
        )),
    }
}

/// Returns true for a step that replaces spaces with `▁` and does not split.
fn is_metaspace_step(step: &Json) -> bool {
    step["replacement"] == "▁" && step["split"] != true
}

/// Returns the texts of the tokens that are neither added nor unused.
fn normal_texts(tokens: &TokenTable) -> BTreeSet<&str> {
    let all = tokens.texts.iter().zip(&tokens.kinds);
    all.filter(|(_, kind)| **kind == kind::NORMAL).map(|(text, _)| text.as_str()).collect()
}

/// Ranks each normal token that merges produce; added tokens are cut out of the text before
/// anything is merged. Fails if the merges of a text are not adjacent, because it would have several
/// ranks.
fn merge_ranks(
    merges: &[[String; 2]],
    normal: &BTreeSet<&str>,
) -> Result<BTreeMap<String, usize>, String> {
    let mut ranks = BTreeMap::new();
    let mut last = String::new();
    for [left, right] in merges {
        let text = format!("{left}{right}");
        if !normal.contains(text.as_str()) {
            continue;
        }
        let rank = ranks.len();
        if text != last && ranks.insert(text.clone(), rank).is_some() {
            return Err(format!(
                "model.merges make `{text}` at different ranks, which llama.cpp's scores cannot \
                 express"
            ));
        }
        last = text;
    }
    Ok(ranks)
}

/// Checks that any two tokens that form a third one are a merge, because llama.cpp joins all of
/// them.
fn check_all_pairs(merges: &[[String; 2]], known: &BTreeSet<&str>) -> Result<(), String> {
    let merges: BTreeSet<(&str, &str)> =
        merges.iter().map(|[left, right]| (left.as_str(), right.as_str())).collect();
    for text in known.iter().filter(|text| !is_byte_token(text)) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_of_added_tokens_may_be_anywhere() {
        let newlines = |count| "\n".repeat(count);
        let added: Vec<Json> = (2..=4)
            .map(|count| json!({"id": count + 1, "content": newlines(count), "special": false}))
            .collect();
        // By score, and those of one score by the lengths of their parts.
        let pairs = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)];
        let merges = pairs.map(|(left, right)| json!([newlines(left), newlines(right)]));
        let mut merges = merges.to_vec();
        merges.push(json!(["a", "b"]));
        let vocab = json!({
            "\n": 0, "a": 1, "b": 2, "\n\n": 3, "\n\n\n": 4, "\n\n\n\n": 5, "ab": 6,
        });
        let tokenizer = json!({
            "added_tokens": added, "pre_tokenizer": null,
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "model": {"type": "BPE", "byte_fallback": true, "vocab": vocab, "merges": merges},
        });
        let tokens = super::super::read_tokens(&tokenizer, 7).unwrap();
        let fields = sentence_piece_fields(&tokenizer, tokens).unwrap();
        let (_, scores) = fields.iter().find(|(name, _)| *name == "ggml.scores").unwrap();
        let unmerged = [UNMERGED_SCORE; 6];
        let expected = unmerged.into_iter().chain([0.0]).collect();
        assert_eq!(*scores, GgufValue::Array(GgufArray::F32(expected)));
        let mut plain = tokenizer;
        plain["added_tokens"] = json!([]);
        let tokens = super::super::read_tokens(&plain, 7).unwrap();
        let refused = sentence_piece_fields(&plain, tokens).unwrap_err();
        assert!(refused.contains("at different ranks"), "{refused}");
    }
}
