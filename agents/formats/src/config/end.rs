//! Which token a tokenizer's settings call the end of a text.

use std::path::Path;

use serde_json::Value;

/// `None` where no file says so; one that cannot be read is somebody else's to complain of.
pub(super) fn of_tokenizer(dir: &Path) -> Option<u32> {
    let settings = object(&dir.join("tokenizer_config.json"))?;
    let token = &settings["eos_token"];
    let token = token.as_str().or_else(|| token["content"].as_str())?;
    in_settings(&settings, token).or_else(|| {
        let added = object(&dir.join("tokenizer.json"))?;
        let added = added["added_tokens"].as_array()?;
        id(&added.iter().find(|added| added["content"] == token)?["id"])
    })
}

fn in_settings(settings: &Value, token: &str) -> Option<u32> {
    let added = settings["added_tokens_decoder"].as_object()?;
    let (number, _) = added.iter().find(|(_, added)| added["content"] == token)?;
    number.parse().ok()
}

fn id(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

fn object(path: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}
