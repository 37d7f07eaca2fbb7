//! Finds the end-of-text token in the settings of a tokenizer.

use std::path::Path;

use serde_json::Value;

/// Reads the id of the tokenizer's `eos_token` from `tokenizer_config.json`, or else from
/// `tokenizer.json`. An unreadable file gives `None`: the loader of the tokenizer reports it.
pub(super) fn read_end_token(dir: &Path) -> Option<u32> {
    let settings = read_json(&dir.join("tokenizer_config.json"))?;
    let token = &settings["eos_token"];
    let token = token.as_str().or_else(|| token["content"].as_str())?;
    find_added_token(&settings, token).or_else(|| {
        let added = read_json(&dir.join("tokenizer.json"))?;
        let added = added["added_tokens"].as_array()?;
        parse_token_id(&added.iter().find(|added| added["content"] == token)?["id"])
    })
}

fn find_added_token(settings: &Value, token: &str) -> Option<u32> {
    let added = settings["added_tokens_decoder"].as_object()?;
    let (number, _) = added.iter().find(|(_, added)| added["content"] == token)?;
    number.parse().ok()
}

fn parse_token_id(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

fn read_json(path: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}
