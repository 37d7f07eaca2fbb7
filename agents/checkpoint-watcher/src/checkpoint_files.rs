//! Classifies the files of a checkpoint by name.

use serde::{Deserialize, Serialize};

/// An adapter or a whole model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckpointContent {
    Adapter,
    Model,
}

pub(crate) const ADAPTER_FILE: &str = formats::peft::TENSOR_FILE;
pub(crate) const ADAPTER_CONFIG: &str = formats::peft::CONFIG_FILE;
pub(crate) const MODEL_FILE: &str = formats::SINGLE_WEIGHTS_FILE;
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
pub(crate) const MODEL_CONFIG: &str = "config.json";

const ADAPTER_SIDE_FILES: [&str; 13] = list_side_files(ADAPTER_CONFIG);
const MODEL_SIDE_FILES: [&str; 13] = list_side_files(MODEL_CONFIG);

/// Lists the settings file, the side files of a model (such as the tokenizer) and the chat
/// template. The remaining files (optimizer, scheduler, random states, training arguments) are
/// pickles and are not needed for evaluation.
const fn list_side_files(settings: &'static str) -> [&'static str; 13] {
    let mut names = [settings; 13];
    let mut at = 0;
    while at < formats::SIDE_FILES.len() {
        names[at + 1] = formats::SIDE_FILES[at];
        at += 1;
    }
    names[at + 1] = "chat_template.json";
    names
}

pub(crate) fn side_files(content: CheckpointContent) -> &'static [&'static str] {
    match content {
        CheckpointContent::Adapter => &ADAPTER_SIDE_FILES,
        CheckpointContent::Model => &MODEL_SIDE_FILES,
    }
}

pub(crate) fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors")
}

/// Returns true if each save writes the file with the weights.
pub(crate) fn is_settings(name: &str) -> bool {
    [ADAPTER_CONFIG, MODEL_CONFIG, INDEX_FILE].contains(&name)
}

pub(crate) fn is_published(name: &str) -> bool {
    is_weights(name) || is_settings(name) || ADAPTER_SIDE_FILES.contains(&name)
}

pub(crate) fn is_torch(name: &str) -> bool {
    [".pt", ".pth", ".bin"].iter().any(|ending| name.ends_with(ending))
}
