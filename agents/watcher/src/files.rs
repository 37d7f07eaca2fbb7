//! Which file of a checkpoint is what, by its name.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    Adapter,
    Model,
}

pub(crate) const ADAPTER: &str = formats::peft::TENSOR_FILE;
pub(crate) const ADAPTER_CONFIG: &str = formats::peft::CONFIG_FILE;
pub(crate) const MODEL: &str = formats::SINGLE_FILE;
pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const CONFIG: &str = "config.json";

const WITH_ADAPTER: [&str; 11] = with(ADAPTER_CONFIG);
const WITH_MODEL: [&str; 11] = with(CONFIG);

/// Settings, and what belongs to a model beside them. The rest (optimizer, scheduler, random
/// states, training arguments) are pickles, and nobody who measures needs them.
const fn with(settings: &'static str) -> [&'static str; 11] {
    let mut names = [settings; 11];
    let mut at = 0;
    while at < formats::SIDE_FILES.len() {
        names[at + 1] = formats::SIDE_FILES[at];
        at += 1;
    }
    names[at + 1] = "chat_template.json";
    names
}

/// What is published of a kind beside the weights.
pub(crate) fn beside(content: Content) -> &'static [&'static str] {
    match content {
        Content::Adapter => &WITH_ADAPTER,
        Content::Model => &WITH_MODEL,
    }
}

pub(crate) fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors")
}

/// What a save writes next to the weights, each time.
pub(crate) fn is_settings(name: &str) -> bool {
    [ADAPTER_CONFIG, CONFIG, INDEX].contains(&name)
}

pub(crate) fn is_published(name: &str) -> bool {
    is_weights(name) || is_settings(name) || WITH_ADAPTER.contains(&name)
}

/// Written by `torch.save`.
pub(crate) fn is_torch(name: &str) -> bool {
    [".pt", ".pth", ".bin"].iter().any(|ending| name.ends_with(ending))
}
