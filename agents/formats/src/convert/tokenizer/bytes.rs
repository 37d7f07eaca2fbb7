//! Byte-level BPE, which llama.cpp calls `gpt2`: the way text is taken apart beforehand has a
//! name, found by what the file says and not by the model's.

use serde_json::{Value as Json, json};

use super::{Fields, Tokens};
use crate::gguf::{Array, Value};

/// A way to take text apart before BPE.
struct Way {
    /// `tokenizer.ggml.pre`
    name: &'static str,
    split: Split<'static>,
    /// Whether a piece that is a token needs no merges, which llama.cpp ties to the name.
    ignore_merges: bool,
}

#[derive(PartialEq, Eq)]
enum Split<'a> {
    Regex(&'a str),
    /// GPT-2's regular expression, which the byte level step brings along.
    Gpt2,
    /// Digits one by one, then as GPT-2.
    DigitsThenGpt2,
}

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const WAYS: [Way; 8] = [
    Way { name: "qwen2", split: Split::Regex(QWEN2), ignore_merges: false },
    Way { name: "qwen35", split: Split::Regex(QWEN35), ignore_merges: false },
    Way { name: "llama-bpe", split: Split::Regex(LLAMA3), ignore_merges: true },
    // Llama 3's pieces, with their merges.
    Way { name: "smaug-bpe", split: Split::Regex(LLAMA3), ignore_merges: false },
    Way { name: "gpt-4o", split: Split::Regex(GPT4O), ignore_merges: false },
    Way { name: "tekken", split: Split::Regex(TEKKEN), ignore_merges: true },
    Way { name: "smollm", split: Split::DigitsThenGpt2, ignore_merges: false },
    Way { name: "gpt-2", split: Split::Gpt2, ignore_merges: false },
];

pub(super) fn fields(json: &Json, tokens: Tokens) -> Result<Fields, String> {
    check_normalizer(&json["normalizer"])?;
    let merges = super::merges(json)?;
    let way = way(json, merges.is_empty())?;
    // A merge is one text with one space: those inside are written as the byte level does.
    let line = |pair: [String; 2]| pair.map(|part| part.replace(' ', "Ġ")).join(" ");
    let merges = merges.into_iter().map(line).collect();
    let mut fields = vec![("ggml.model", Value::from("gpt2")), ("ggml.pre", Value::from(way.name))];
    fields.extend(tokens.fields());
    fields.push(("ggml.merges", Value::Array(Array::Strings(merges))));
    Ok(fields)
}

/// llama.cpp leaves text as it is; text that is not in NFC may be read otherwise by it.
fn check_normalizer(normalizer: &Json) -> Result<(), String> {
    match normalizer["type"].as_str() {
        Some("NFC") | None => Ok(()),
        Some("Sequence") if normalizer["normalizers"] == json!([]) => Ok(()),
        Some(other) => Err(format!("normalizer {other} is not one of llama.cpp's: NFC or none")),
    }
}

/// Where nothing is merged a token is a byte, however the text was taken apart: GPT-2's way does.
fn way(json: &Json, merges_nothing: bool) -> Result<&'static Way, String> {
    let ignore_merges = json["model"]["ignore_merges"] == true;
    let pre_tokenizer = &json["pre_tokenizer"];
    let bytes = is_byte_level(pre_tokenizer, false) && merges_nothing && !ignore_merges;
    let found = split(pre_tokenizer).or(bytes.then_some(Split::Gpt2)).and_then(|split| {
        WAYS.iter().find(|way| way.split == split && way.ignore_merges == ignore_merges)
    });
    found.ok_or_else(|| {
        let known: Vec<&str> = WAYS.iter().map(|way| way.name).collect();
        let text: String = pre_tokenizer.to_string().chars().take(400).collect();
        format!(
            "pre_tokenizer {text} with ignore_merges {ignore_merges} is none of those known here \
             ({}); convert the model with llama.cpp's own converter if that knows it",
            known.join(", ")
        )
    })
}

/// What `tokenizer.json` says of a way of that name, and whether it ignores merges.
pub(crate) fn pre_tokenizer(name: &str) -> Option<(Json, bool)> {
    let way = WAYS.iter().find(|way| way.name == name)?;
    let bytes = |regex: bool| {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
               "use_regex": regex})
    };
    let steps = |steps: [Json; 2]| json!({"type": "Sequence", "pretokenizers": steps});
    let json = match way.split {
        Split::Gpt2 => bytes(true),
        Split::DigitsThenGpt2 => {
            steps([json!({"type": "Digits", "individual_digits": true}), bytes(true)])
        }
        Split::Regex(regex) => {
            let split = json!({"type": "Split", "pattern": {"Regex": regex},
                               "behavior": "Isolated", "invert": false});
            steps([split, bytes(false)])
        }
    };
    Some((json, way.ignore_merges))
}

fn split(pre_tokenizer: &Json) -> Option<Split<'_>> {
    let one = std::slice::from_ref(pre_tokenizer);
    let steps = pre_tokenizer["pretokenizers"].as_array().map_or(one, Vec::as_slice);
    match steps {
        [bytes] if is_byte_level(bytes, true) => Some(Split::Gpt2),
        [digits, bytes] if is_digits(digits) && is_byte_level(bytes, true) => {
            Some(Split::DigitsThenGpt2)
        }
        [regex, bytes] if is_byte_level(bytes, false) => split_regex(regex).map(Split::Regex),
        _ => None,
    }
}

/// `regex`: whether the step takes text apart, or only turns it into bytes.
fn is_byte_level(step: &Json, regex: bool) -> bool {
    let flag = |name: &str| step[name].as_bool().unwrap_or(true);
    step["type"] == "ByteLevel" && !flag("add_prefix_space") && flag("use_regex") == regex
}

fn is_digits(step: &Json) -> bool {
    step["type"] == "Digits" && step["individual_digits"] == true
}

/// The expression whose matches are the pieces.
fn split_regex(step: &Json) -> Option<&str> {
    let between = step["behavior"] == "Isolated" && step["invert"] != true;
    let matches = step["behavior"] == "Removed" && step["invert"] == true;
    let splits = step["type"] == "Split" && (between || matches);
    step["pattern"]["Regex"].as_str().filter(|_| splits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(pre_tokenizer: &Json, ignore_merges: bool) -> Result<&'static str, String> {
        let model = json!({"ignore_merges": ignore_merges});
        way(&json!({"pre_tokenizer": pre_tokenizer, "model": model}), false).map(|way| way.name)
    }

    fn after_split(regex: &str, behavior: &str, invert: bool) -> Json {
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert},
            {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
        ]})
    }

    #[test]
    fn the_name_follows_from_what_the_tokenizer_does() {
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true});
        let digits = json!({"type": "Digits", "individual_digits": true});
        let smollm = json!({"type": "Sequence", "pretokenizers": [digits, bytes]});
        for (pre_tokenizer, ignore_merges, expected) in [
            (after_split(QWEN2, "Isolated", false), false, "qwen2"),
            (after_split(LLAMA3, "Isolated", false), true, "llama-bpe"),
            (after_split(LLAMA3, "Removed", true), true, "llama-bpe"),
            (after_split(LLAMA3, "Isolated", false), false, "smaug-bpe"),
            (after_split(TEKKEN, "Isolated", false), true, "tekken"),
            (bytes, false, "gpt-2"),
            (smollm, false, "smollm"),
        ] {
            assert_eq!(name(&pre_tokenizer, ignore_merges).as_deref(), Ok(expected));
        }
        for way in &WAYS {
            let (pre_tokenizer, ignore_merges) = super::pre_tokenizer(way.name).unwrap();
            assert_eq!(name(&pre_tokenizer, ignore_merges), Ok(way.name), "back again");
        }
        let whole = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
        let bytes_alone = way(&json!({"pre_tokenizer": whole, "model": {}}), true).unwrap();
        assert_eq!(bytes_alone.name, "gpt-2");
        let prefixed = json!({"type": "ByteLevel", "add_prefix_space": true});
        for (pre_tokenizer, ignore_merges) in [
            (after_split(r"\w+|\s+", "Isolated", false), false),
            (after_split(QWEN2, "Removed", false), false),
            (after_split(QWEN2, "Isolated", false), true),
            (prefixed, false),
            (whole, false),
            (Json::Null, false),
        ] {
            let error = name(&pre_tokenizer, ignore_merges).unwrap_err();
            assert!(error.contains("pre_tokenizer"), "{error}");
        }
    }
}
