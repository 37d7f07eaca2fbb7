//! Finds the end-of-text token in the settings of a tokenizer.

use std::path::Path;

use serde_json::Value;

use super::fields::SETTINGS_BYTES_MAX;
use crate::{TokenizerParts, bounded_text::read_text};

/// The file of a large vocabulary has about 30 MB.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;

/// Reads the id of the tokenizer's `eos_token` from `tokenizer_config.json`, or else from
/// `tokenizer.json`. An unreadable file gives `None`: the loader of the tokenizer reports it.
pub(super) fn read_end_token(dir: &Path) -> Option<u32> {
    let settings = read_text(&dir.join("tokenizer_config.json"), SETTINGS_BYTES_MAX).ok()?;
    let settings: Value = serde_json::from_str(&settings).ok()?;
    let token = &settings["eos_token"];
    let token = token.as_str().or_else(|| token["content"].as_str())?;
    find_added_token(&settings, token).or_else(|| {
        let text = read_text(&dir.join("tokenizer.json"), TOKENIZER_BYTES_MAX).ok()?;
        let parts = TokenizerParts::parse(&text).ok()?;
        let added = parts.added_tokens.as_array()?;
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
