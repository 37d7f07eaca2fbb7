//! Byte-level BPE, which llama.cpp calls `gpt2`. The name of its pre-tokenizer is found by
//! comparing the tokenizer's file with the known ones, not by the model's name.

use serde_json::{Value as Json, json};

use super::{GgufFields, TokenTable};
use crate::gguf::{GgufArray, GgufValue};

struct PreTokenizer {
    /// The value of `tokenizer.ggml.pre`.
    name: &'static str,
    split: SplitRule<'static>,
    /// True if a piece that is a token needs no merges. llama.cpp ties this to the name.
    ignore_merges: bool,
}

#[derive(PartialEq, Eq)]
enum SplitRule<'a> {
    /// The pieces are the matches.
    Regex(&'a str),
    /// GPT-2's regular expression, which the byte-level step contains.
    Gpt2,
    /// Single digits, then GPT-2's regular expression.
    DigitsThenGpt2,
}

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const PRE_TOKENIZERS: [PreTokenizer; 8] = [
    PreTokenizer { name: "qwen2", split: SplitRule::Regex(QWEN2), ignore_merges: false },
    PreTokenizer { name: "qwen35", split: SplitRule::Regex(QWEN35), ignore_merges: false },
    PreTokenizer { name: "llama-bpe", split: SplitRule::Regex(LLAMA3), ignore_merges: true },
    // The pieces of Llama 3, with merges.
    PreTokenizer { name: "smaug-bpe", split: SplitRule::Regex(LLAMA3), ignore_merges: false },
    PreTokenizer { name: "gpt-4o", split: SplitRule::Regex(GPT4O), ignore_merges: false },
    PreTokenizer { name: "tekken", split: SplitRule::Regex(TEKKEN), ignore_merges: true },
    PreTokenizer { name: "smollm", split: SplitRule::DigitsThenGpt2, ignore_merges: false },
    PreTokenizer { name: "gpt-2", split: SplitRule::Gpt2, ignore_merges: false },
];

pub(super) fn byte_level_fields(json: &Json, tokens: TokenTable) -> Result<GgufFields, String> {
    check_normalizer(&json["normalizer"])?;
    let merges = super::read_merges(json)?;
    let way = find_pre_tokenizer(json, merges.is_empty())?;
    // A merge is written as one text with one space. Spaces inside tokens get the byte level's
    // replacement.
    let line = |pair: [String; 2]| pair.map(|part| part.replace(' ', "Ġ")).join(" ");
    let merges = merges.into_iter().map(line).collect();
    let mut fields =
        vec![("ggml.model", GgufValue::from("gpt2")), ("ggml.pre", GgufValue::from(way.name))];
    fields.extend(tokens.into_fields());
    fields.push(("ggml.merges", GgufValue::Array(GgufArray::Strings(merges))));
    Ok(fields)
}

/// Checks that the normalizer is NFC or absent. llama.cpp does not normalise, so it may tokenize
/// text that is not in NFC differently.
fn check_normalizer(normalizer: &Json) -> Result<(), String> {
    match normalizer["type"].as_str() {
        Some("NFC") | None => Ok(()),
        Some("Sequence") if normalizer["normalizers"] == json!([]) => Ok(()),
        Some(other) => Err(format!("normalizer {other} is not one of llama.cpp's: NFC or none")),
    }
}

/// Finds the pre-tokenizer that `tokenizer.json` describes. Without merges every token is a byte
/// and the rule does not matter, so GPT-2's is used.
fn find_pre_tokenizer(json: &Json, merges_nothing: bool) -> Result<&'static PreTokenizer, String> {
    let ignore_merges = json["model"]["ignore_merges"] == true;
    let pre_tokenizer = &json["pre_tokenizer"];
    let bytes = is_byte_level(pre_tokenizer, false) && merges_nothing && !ignore_merges;
    let found =
        parse_split_rule(pre_tokenizer).or(bytes.then_some(SplitRule::Gpt2)).and_then(|split| {
            PRE_TOKENIZERS
                .iter()
                .find(|way| way.split == split && way.ignore_merges == ignore_merges)
        });
    found.ok_or_else(|| {
        let known: Vec<&str> = PRE_TOKENIZERS.iter().map(|way| way.name).collect();
        let text: String = pre_tokenizer.to_string().chars().take(400).collect();
        format!(
            "pre_tokenizer {text} with ignore_merges {ignore_merges} is not supported ({}); \
             convert the model with llama.cpp's own converter if that knows it",
            known.join(", ")
        )
    })
}

/// Returns the pre-tokenizer section for a name of llama.cpp, and true if merges are ignored;
/// `None` for an unknown name.
pub(crate) fn pre_tokenizer_json(name: &str) -> Option<(Json, bool)> {
    let way = PRE_TOKENIZERS.iter().find(|way| way.name == name)?;
    let bytes = |regex: bool| {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
               "use_regex": regex})
    };
    let steps = |steps: [Json; 2]| json!({"type": "Sequence", "pretokenizers": steps});
    let json = match way.split {
        SplitRule::Gpt2 => bytes(true),
        SplitRule::DigitsThenGpt2 => {
            steps([json!({"type": "Digits", "individual_digits": true}), bytes(true)])
        }
        SplitRule::Regex(regex) => {
            let split = json!({"type": "Split", "pattern": {"Regex": regex},
                               "behavior": "Isolated", "invert": false});
            steps([split, bytes(false)])
        }
    };
    Some((json, way.ignore_merges))
}

/// Returns `None` for an unknown rule.
fn parse_split_rule(pre_tokenizer: &Json) -> Option<SplitRule<'_>> {
    let one = std::slice::from_ref(pre_tokenizer);
    let steps = pre_tokenizer["pretokenizers"].as_array().map_or(one, Vec::as_slice);
    match steps {
        [bytes] if is_byte_level(bytes, true) => Some(SplitRule::Gpt2),
        [digits, bytes] if is_digit_split(digits) && is_byte_level(bytes, true) => {
            Some(SplitRule::DigitsThenGpt2)
        }
        [regex, bytes] if is_byte_level(bytes, false) => {
            parse_split_regex(regex).map(SplitRule::Regex)
        }
        _ => None,
    }
}

/// Returns true for a byte-level step without a prefix space. `regex` is true if the step must
/// split text, false if it must only map it to bytes.
fn is_byte_level(step: &Json, regex: bool) -> bool {
    let flag = |name: &str| step[name].as_bool().unwrap_or(true);
    step["type"] == "ByteLevel" && !flag("add_prefix_space") && flag("use_regex") == regex
}

fn is_digit_split(step: &Json) -> bool {
    step["type"] == "Digits" && step["individual_digits"] == true
}

/// Returns the regular expression of a step whose pieces are the matches.
fn parse_split_regex(step: &Json) -> Option<&str> {
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
        find_pre_tokenizer(&json!({"pre_tokenizer": pre_tokenizer, "model": model}), false)
            .map(|way| way.name)
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
        for way in &PRE_TOKENIZERS {
            let (pre_tokenizer, ignore_merges) = super::pre_tokenizer_json(way.name).unwrap();
            assert_eq!(name(&pre_tokenizer, ignore_merges), Ok(way.name), "back again");
        }
        let whole = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
        let bytes_alone =
            find_pre_tokenizer(&json!({"pre_tokenizer": whole, "model": {}}), true).unwrap();
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
