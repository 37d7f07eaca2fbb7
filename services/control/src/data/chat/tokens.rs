//! What a tokenizer's files say of special tokens: their names for templates, which one is put
//! before every text, and how those that end a text are written.

use std::{
    collections::BTreeMap,
    io::Read,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

/// A large vocabulary's tokenizer.json has some 30 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    #[error("read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a JSON object (F106)")]
    Json { path: PathBuf, source: serde_json::Error },
}

#[derive(Debug, Default)]
pub(super) struct Tokens {
    /// `bos_token` and the like, as templates name them.
    pub named: BTreeMap<String, String>,
    /// What the tokenizer itself puts before a text.
    pub beginning: Option<String>,
    /// Added tokens by id.
    added: BTreeMap<u32, String>,
}

impl Tokens {
    /// And the template, if there is one: a file of its own wins over the configuration.
    pub(super) fn load(dir: &Path) -> Result<(Self, Option<String>), TokensError> {
        let object = |name: &str| object(&dir.join(name));
        let settings = object("tokenizer_config.json")?.unwrap_or_default();
        let names = object("special_tokens_map.json")?.unwrap_or_default();
        let tokenizer = object("tokenizer.json")?.unwrap_or_default();
        let own = text(&dir.join("chat_template.jinja"))?;
        let template = own.or_else(|| settings.get("chat_template").and_then(of_settings));
        let named = names.iter().chain(&settings).filter(|(name, _)| name.ends_with("_token"));
        let named = named.filter_map(|(name, token)| Some((name.clone(), content(token)?.into())));
        let added = tokenizer.get("added_tokens").and_then(Value::as_array);
        let added = added.into_iter().flatten().filter_map(|token| {
            let id = u32::try_from(token["id"].as_u64()?).ok()?;
            Some((id, token["content"].as_str()?.to_owned()))
        });
        let beginning = tokenizer.get("post_processor").and_then(beginning);
        Ok((Self { named: named.collect(), beginning, added: added.collect() }, template))
    }

    /// An added token, as it is written.
    pub(super) fn text(&self, id: u32) -> Option<&str> {
        self.added.get(&id).map(String::as_str)
    }

    /// The longest added token a text ends with.
    pub(super) fn at_end_of(&self, text: &str) -> Option<&str> {
        let tokens = self.added.values().filter(|token| !token.is_empty());
        let there = tokens.filter(|token| text.ends_with(*token));
        there.max_by_key(|token| token.len()).map(String::as_str)
    }
}

/// Of several, the one called `default`.
fn of_settings(template: &Value) -> Option<String> {
    let named = template.as_array().map_or(&[] as &[_], Vec::as_slice);
    let default = named.iter().find(|entry| entry["name"] == "default").or(named.first());
    default.map_or(template, |entry| &entry["template"]).as_str().map(str::to_owned)
}

fn content(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

/// The token that a `TemplateProcessing` step, alone or among others, puts first.
fn beginning(post_processor: &Value) -> Option<String> {
    let one = std::slice::from_ref(post_processor);
    let steps = post_processor["processors"].as_array().map_or(one, Vec::as_slice);
    let step = steps.iter().find(|step| step["type"] == "TemplateProcessing")?;
    let name = step["single"].as_array()?.first()?["SpecialToken"]["id"].as_str()?;
    let tokens = step["special_tokens"][name]["tokens"].as_array();
    let token = tokens.and_then(|tokens| tokens.first()).and_then(Value::as_str);
    Some(token.unwrap_or(name).to_owned())
}

fn text(path: &Path) -> Result<Option<String>, TokensError> {
    let failed = |source| TokensError::Read { path: path.to_owned(), source };
    if !path.exists() {
        return Ok(None);
    }
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
    Ok(Some(text))
}

fn object(path: &Path) -> Result<Option<Map<String, Value>>, TokensError> {
    let Some(text) = text(path)? else { return Ok(None) };
    let read = serde_json::from_str(&text);
    read.map(Some).map_err(|source| TokensError::Json { path: path.to_owned(), source })
}
