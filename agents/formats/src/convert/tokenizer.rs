//! Converts a model's tokenizer to GGUF fields. llama.cpp has a fixed set of pre-tokenizers, each
//! with a name. The name is derived from what `tokenizer.json` does; a tokenizer that matches none
//! of them is refused.

mod byte_level;
mod sentence_piece;
mod special_tokens;

pub(crate) use byte_level::pre_tokenizer_json;
pub(crate) use special_tokens::SPECIAL_TOKENS;

use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use super::ConvertError;
use crate::gguf::{GgufArray, GgufValue};
use crate::{Architecture, ModelConfig};

/// The largest known files have 35 MB.
const FILE_BYTES_MAX: u64 = 128 << 20;

/// ggml's numbers for the types of tokens.
pub(crate) mod kind {
    pub(crate) const NORMAL: i32 = 1;
    pub(crate) const UNKNOWN: i32 = 2;
    /// Never produced by text.
    pub(crate) const CONTROL: i32 = 3;
    /// An added token that text can produce.
    pub(crate) const USER_DEFINED: i32 = 4;
    pub(crate) const UNUSED: i32 = 5;
    pub(crate) const BYTE: i32 = 6;
}

pub(super) fn tokenizer_fields(
    dir: &Path,
    config: &ModelConfig,
) -> Result<Vec<(String, GgufValue)>, ConvertError> {
    let path = dir.join("tokenizer.json");
    let json = read_json(&path)?;
    let refuse = |what| ConvertError::Tokenizer { path: path.clone(), what };
    let json = without_image_token(json, config);
    let mut fields = model_fields(&json, config.vocab_size).map_err(refuse)?;
    fields.extend(special_tokens::special_token_fields(dir, &json, config.vocab_size)?);
    let named = |(name, value): (&str, GgufValue)| (format!("tokenizer.{name}"), value);
    let mut fields: Vec<_> = fields.into_iter().map(named).collect();
    if config.architecture == Architecture::Phi3 && strips_as_phi3(&json) {
        fields.push(("general.name".into(), GgufValue::from("Phi-3")));
    }
    Ok(fields)
}

/// Returns true if the tokenizer of a Hugging Face directory is a byte-level BPE: the only kind that
/// is also read from GGUF files here.
pub fn has_byte_level_tokenizer(dir: &Path) -> Result<bool, ConvertError> {
    let json = read_json(&dir.join("tokenizer.json"))?;
    Ok(json["model"]["byte_fallback"] != true)
}

/// Returns true if special tokens take the spaces after them, as in Phi-3. llama.cpp does that for
/// models of this name, which must have the tokens that it looks up.
fn strips_as_phi3(json: &Json) -> bool {
    let added = json["added_tokens"].as_array().map_or(&[] as &[_], Vec::as_slice);
    let has = |text: &str| added.iter().any(|token| token["content"] == text);
    let all = ["<unk>", "<s>", "</s>", "<|endoftext|>"];
    all.into_iter().all(has) && added.iter().any(|token| token["rstrip"] == true)
}

/// Removes the token of images, for which Gemma 3 without images has no embedding.
fn without_image_token(mut json: Json, config: &ModelConfig) -> Json {
    let has_row =
        |added: &Json| added["id"].as_u64().is_none_or(|id| id < config.vocab_size as u64);
    if config.architecture == Architecture::Gemma3
        && let Some(added) = json.get_mut("added_tokens").and_then(Json::as_array_mut)
    {
        added.retain(|added| has_row(added) || added["content"] != "<image_soft_token>");
    }
    json
}

/// The names lack the prefix `tokenizer.`.
type GgufFields = Vec<(&'static str, GgufValue)>;

/// Builds the fields of the vocabulary and its merges or scores; the error names what llama.cpp
/// lacks.
fn model_fields(json: &Json, vocab_size: usize) -> Result<GgufFields, String> {
    let model = &json["model"];
    match model["type"].as_str() {
        Some("BPE") => {}
        other => {
            return Err(format!(
                "model.type is {}; llama.cpp's files of this architecture need BPE",
                other.unwrap_or("missing")
            ));
        }
    }
    for field in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[field].as_str().is_some_and(|text| !text.is_empty()) {
            return Err(format!(
                "model.{field} is {}, which llama.cpp does not support",
                model[field]
            ));
        }
    }
    let tokens = read_tokens(json, vocab_size)?;
    if model["byte_fallback"] == true {
        sentence_piece::sentence_piece_fields(json, tokens)
    } else {
        byte_level::byte_level_fields(json, tokens)
    }
}

/// The tokens by id, each with its type.
struct TokenTable {
    texts: Vec<String>,
    kinds: Vec<i32>,
}

impl TokenTable {
    fn into_fields(self) -> [(&'static str, GgufValue); 2] {
        let (texts, kinds) = (GgufArray::Strings(self.texts), GgufArray::I32(self.kinds));
        [("ggml.tokens", GgufValue::Array(texts)), ("ggml.token_type", GgufValue::Array(kinds))]
    }
}

/// Reads the vocabulary and the added tokens. Ids that the model has and the tokenizer lacks become
/// unused padding tokens.
fn read_tokens(json: &Json, vocab_size: usize) -> Result<TokenTable, String> {
    let texts = (0..vocab_size).map(|id| format!("[PAD{id}]")).collect();
    let mut tokens = TokenTable { texts, kinds: vec![kind::UNUSED; vocab_size] };
    let vocab = json["model"]["vocab"].as_object().ok_or("model.vocab is missing")?;
    for (text, id) in vocab {
        tokens.set_token(text, id, kind::NORMAL)?;
    }
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        let text = added["content"].as_str().ok_or("an added token has no content")?;
        if added["special"] == true || looks_special(text) {
            tokens.set_token(text, &added["id"], kind::CONTROL)?;
        } else {
            tokens.set_token(&text.replace('▁', " "), &added["id"], kind::USER_DEFINED)?;
        }
    }
    Ok(tokens)
}

impl TokenTable {
    /// Fails if the id is not below the model's vocabulary size.
    fn set_token(&mut self, text: &str, id: &Json, kind: i32) -> Result<(), String> {
        let size = self.texts.len();
        let index = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|id| *id < size);
        let index = index.ok_or_else(|| {
            format!("token `{text}` has id {id}, but the model's vocab_size is {size}")
        })?;
        text.clone_into(&mut self.texts[index]);
        self.kinds[index] = kind;
        Ok(())
    }
}

/// Returns true for the form of a control token. Some models do not mark theirs as special.
fn looks_special(text: &str) -> bool {
    let between = |start: &str, end: &str| text.starts_with(start) && text.ends_with(end);
    between("<|", "|>")
        || between("<｜", "｜>")
        || between("<unused", ">")
        || matches!(text, "<pad>" | "<mask>" | "<2mass>" | "[@BOS@]")
}

/// Reads both forms of merges: a line or a pair.
fn read_merges(json: &Json) -> Result<Vec<[String; 2]>, String> {
    let merges = json["model"]["merges"].as_array().ok_or("model.merges is missing")?;
    let pair = |merge: &Json| match merge {
        Json::String(line) => line.split_once(' ').map(|(a, b)| [a.to_owned(), b.to_owned()]),
        Json::Array(pair) => match pair.as_slice() {
            [Json::String(a), Json::String(b)] => Some([a.clone(), b.clone()]),
            _ => None,
        },
        _ => None,
    };
    let read = merges.iter().map(pair).collect::<Option<_>>();
    read.ok_or_else(|| "model.merges has an entry that is not a pair".into())
}

fn read_json(path: &Path) -> Result<Json, ConvertError> {
    let text = read_text(path)?;
    serde_json::from_str(&text).map_err(|source| ConvertError::Json { path: path.into(), source })
}

fn read_text(path: &Path) -> Result<String, ConvertError> {
    use std::io::Read;
    let mut text = String::new();
    let file = std::fs::File::open(path);
    let read = file.and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text));
    let path = || PathBuf::from(path);
    match read {
        Ok(_) => Ok(text),
        Err(source) => Err(ConvertError::Read { path: path(), source }),
    }
}
