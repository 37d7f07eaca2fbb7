//! A model's tokenizer as GGUF fields. llama.cpp has a fixed set of ways to take text apart and
//! knows them by name: the name follows from what `tokenizer.json` does, or there is none.

mod bytes;
mod pieces;
mod special;

pub(crate) use bytes::pre_tokenizer;

use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use super::ConvertError;
use crate::Config;
use crate::gguf::{Array, Value};

/// Of a tokenizer's file; the largest there are have 35 MB.
const FILE_BYTES_MAX: u64 = 128 << 20;

/// As ggml numbers what a token is.
pub(crate) mod kind {
    pub(crate) const NORMAL: i32 = 1;
    pub(crate) const UNKNOWN: i32 = 2;
    pub(crate) const CONTROL: i32 = 3;
    pub(crate) const USER_DEFINED: i32 = 4;
    pub(crate) const UNUSED: i32 = 5;
    pub(crate) const BYTE: i32 = 6;
}

pub(super) fn fields(dir: &Path, config: &Config) -> Result<Vec<(String, Value)>, ConvertError> {
    let path = dir.join("tokenizer.json");
    let json = read_json(&path)?;
    let refuse = |what| ConvertError::Tokenizer { path: path.clone(), what };
    let mut fields = kind_fields(&json, config.vocab_size).map_err(refuse)?;
    fields.extend(special::fields(dir, &json, config.vocab_size)?);
    let named = |(name, value): (&str, Value)| (format!("tokenizer.{name}"), value);
    Ok(fields.into_iter().map(named).collect())
}

type Fields = Vec<(&'static str, Value)>;

fn kind_fields(json: &Json, vocab_size: usize) -> Result<Fields, String> {
    let model = &json["model"];
    match model["type"].as_str() {
        Some("BPE") => {}
        other => {
            return Err(format!(
                "model.type is {}; llama.cpp's files of this architecture want BPE",
                other.unwrap_or("missing")
            ));
        }
    }
    for field in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[field].as_str().is_some_and(|text| !text.is_empty()) {
            return Err(format!("model.{field} is {}; llama.cpp has no such thing", model[field]));
        }
    }
    let tokens = tokens(json, vocab_size)?;
    if model["byte_fallback"] == true {
        pieces::fields(json, tokens)
    } else {
        bytes::fields(json, tokens)
    }
}

/// Tokens by id, and what each is.
struct Tokens {
    texts: Vec<String>,
    kinds: Vec<i32>,
}

impl Tokens {
    fn fields(self) -> [(&'static str, Value); 2] {
        let (texts, kinds) = (Array::Strings(self.texts), Array::I32(self.kinds));
        [("ggml.tokens", Value::Array(texts)), ("ggml.token_type", Value::Array(kinds))]
    }
}

/// Ids that the model has and the tokenizer does not are filled up.
fn tokens(json: &Json, vocab_size: usize) -> Result<Tokens, String> {
    let texts = (0..vocab_size).map(|id| format!("[PAD{id}]")).collect();
    let mut tokens = Tokens { texts, kinds: vec![kind::UNUSED; vocab_size] };
    let vocab = json["model"]["vocab"].as_object().ok_or("model.vocab is missing")?;
    for (text, id) in vocab {
        tokens.set(text, id, kind::NORMAL)?;
    }
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        let text = added["content"].as_str().ok_or("an added token has no content")?;
        if added["special"] == true || looks_special(text) {
            tokens.set(text, &added["id"], kind::CONTROL)?;
        } else {
            tokens.set(&text.replace('▁', " "), &added["id"], kind::USER_DEFINED)?;
        }
    }
    Ok(tokens)
}

impl Tokens {
    fn set(&mut self, text: &str, id: &Json, kind: i32) -> Result<(), String> {
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

/// Some models do not say that their control tokens are special.
fn looks_special(text: &str) -> bool {
    let between = |start: &str, end: &str| text.starts_with(start) && text.ends_with(end);
    between("<|", "|>")
        || between("<｜", "｜>")
        || between("<unused", ">")
        || matches!(text, "<pad>" | "<mask>" | "<2mass>" | "[@BOS@]")
}

/// Merges, a line each, in either way they are written.
fn merges(json: &Json) -> Result<Vec<[String; 2]>, String> {
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
    read.ok_or_else(|| "model.merges has an entry that is no pair".into())
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
