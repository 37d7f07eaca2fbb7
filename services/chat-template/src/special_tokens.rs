//! The special tokens in a tokenizer's files, or in a GGUF file: their names for templates, the token
//! that the tokenizer prepends to every text, and the added tokens by id.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use formats::TokenizerParts;
use serde_json::{Map, Value};

/// The tokenizer.json of a large vocabulary has about 30 MB.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Those of models of speech describe up to 65 000 tokens, in 12 MB.
const SETTINGS_BYTES_MAX: u64 = 32 << 20;

/// The reason why the files of a tokenizer cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SpecialTokensError {
    #[error("read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a JSON object (F106)")]
    Json { path: PathBuf, source: serde_json::Error },
}

#[derive(Debug, Default)]
pub(crate) struct SpecialTokens {
    /// The special tokens by the names that templates use, such as `bos_token`.
    pub by_name: BTreeMap<String, String>,
    /// The token that the tokenizer itself prepends to every text.
    pub prepended_token: Option<String>,
    added_tokens: BTreeMap<u32, String>,
}

impl SpecialTokens {
    /// Loads the special tokens from a model's directory, and its chat template if it has one:
    /// `chat_template.jinja`, or else the field in `tokenizer_config.json`.
    pub(crate) fn load(dir: &Path) -> Result<(Self, Option<String>), SpecialTokensError> {
        let object = |name: &str| read_object(&dir.join(name));
        let settings = object("tokenizer_config.json")?.unwrap_or_default();
        let names = object("special_tokens_map.json")?.unwrap_or_default();
        let path = dir.join("tokenizer.json");
        let tokenizer = read_text(&path, TOKENIZER_BYTES_MAX)?;
        let tokenizer = tokenizer.as_deref().map(TokenizerParts::parse).transpose();
        let tokenizer = tokenizer.map_err(|source| SpecialTokensError::Json { path, source })?;
        let tokenizer = tokenizer.unwrap_or_default();
        let own = read_text(&dir.join("chat_template.jinja"), SETTINGS_BYTES_MAX)?;
        let template = own.or_else(|| settings.get("chat_template").and_then(template_from_config));
        let named = names.iter().chain(&settings).filter(|(name, _)| name.ends_with("_token"));
        let named =
            named.filter_map(|(name, token)| Some((name.clone(), token_content(token)?.into())));
        Ok((Self::from_tokenizer(named.collect(), &tokenizer), template))
    }

    /// Joins named tokens with those of the `tokenizer.json` of a GGUF file.
    pub(crate) fn from_gguf(
        path: &Path,
        by_name: BTreeMap<String, String>,
        tokenizer_json: &str,
    ) -> Result<Self, SpecialTokensError> {
        let wrong = |source| SpecialTokensError::Json { path: path.to_owned(), source };
        let tokenizer = TokenizerParts::parse(tokenizer_json).map_err(wrong)?;
        Ok(Self::from_tokenizer(by_name, &tokenizer))
    }

    fn from_tokenizer(by_name: BTreeMap<String, String>, tokenizer: &TokenizerParts) -> Self {
        let added = tokenizer.added_tokens.as_array();
        let added = added.into_iter().flatten().filter_map(|token| {
            let id = u32::try_from(token["id"].as_u64()?).ok()?;
            Some((id, token["content"].as_str()?.to_owned()))
        });
        let prepended_token = find_prepended_token(&tokenizer.post_processor);
        Self { by_name, prepended_token, added_tokens: added.collect() }
    }

    pub(crate) fn token_text(&self, id: u32) -> Option<&str> {
        self.added_tokens.get(&id).map(String::as_str)
    }

    pub(crate) fn last_token_of(&self, text: &str) -> Option<&str> {
        let tokens = self.added_tokens.values().filter(|token| !token.is_empty());
        let there = tokens.filter(|token| text.ends_with(*token));
        there.max_by_key(|token| token.len()).map(String::as_str)
    }
}

/// Returns, from a list of named templates, the one named `default`, or else the first.
fn template_from_config(template: &Value) -> Option<String> {
    let named = template.as_array().map_or(&[] as &[_], Vec::as_slice);
    let default = named.iter().find(|entry| entry["name"] == "default").or(named.first());
    default.map_or(template, |entry| &entry["template"]).as_str().map(str::to_owned)
}

/// Accepts a string or an object with the field `content`.
fn token_content(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

/// Returns the special token that a `TemplateProcessing` step puts first.
fn find_prepended_token(post_processor: &Value) -> Option<String> {
    let one = std::slice::from_ref(post_processor);
    let steps = post_processor["processors"].as_array().map_or(one, Vec::as_slice);
    let step = steps.iter().find(|step| step["type"] == "TemplateProcessing")?;
    let name = step["single"].as_array()?.first()?["SpecialToken"]["id"].as_str()?;
    let tokens = step["special_tokens"][name]["tokens"].as_array();
    let token = tokens.and_then(|tokens| tokens.first()).and_then(Value::as_str);
    Some(token.unwrap_or(name).to_owned())
}

/// Returns `None` if the file does not exist. Fails if it has more than `most` bytes.
fn read_text(path: &Path, most: u64) -> Result<Option<String>, SpecialTokensError> {
    let failed = |source| SpecialTokensError::Read { path: path.to_owned(), source };
    if !path.exists() {
        return Ok(None);
    }
    formats::read_text(path, most).map(Some).map_err(failed)
}

fn read_object(path: &Path) -> Result<Option<Map<String, Value>>, SpecialTokensError> {
    let Some(text) = read_text(path, SETTINGS_BYTES_MAX)? else { return Ok(None) };
    let read = serde_json::from_str(&text);
    read.map(Some).map_err(|source| SpecialTokensError::Json { path: path.to_owned(), source })
}
