//! Classifies the files of a checkpoint by name.

use serde::{Deserialize, Serialize};

/// The content of a checkpoint: an adapter or a whole model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckpointContent {
    Adapter,
    Model,
}

/// Name of the adapter's weights.
pub(crate) const ADAPTER_FILE: &str = formats::peft::TENSOR_FILE;
/// Name of the adapter's settings.
pub(crate) const ADAPTER_CONFIG: &str = formats::peft::CONFIG_FILE;
/// Name of a whole model's weights in one file.
pub(crate) const MODEL_FILE: &str = formats::SINGLE_WEIGHTS_FILE;
/// Name of the index of weights in several files.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
/// Name of the model's settings.
pub(crate) const MODEL_CONFIG: &str = "config.json";

/// Files published with an adapter's weights.
const ADAPTER_SIDE_FILES: [&str; 11] = list_side_files(ADAPTER_CONFIG);
/// Files published with a model's weights.
const MODEL_SIDE_FILES: [&str; 11] = list_side_files(MODEL_CONFIG);

/// Returns the settings file, the side files of a model (such as the tokenizer) and the chat
/// template. The remaining files (optimizer, scheduler, random states, training arguments) are
/// pickles and are not needed for evaluation.
const fn list_side_files(settings: &'static str) -> [&'static str; 11] {
    let mut names = [settings; 11];
    let mut at = 0;
    while at < formats::SIDE_FILES.len() {
        names[at + 1] = formats::SIDE_FILES[at];
        at += 1;
    }
    names[at + 1] = "chat_template.json";
    names
}

/// Returns the names of the files to publish with the weights.
pub(crate) fn side_files(content: CheckpointContent) -> &'static [&'static str] {
    match content {
        CheckpointContent::Adapter => &ADAPTER_SIDE_FILES,
        CheckpointContent::Model => &MODEL_SIDE_FILES,
    }
}

/// Returns true if the file contains weights.
pub(crate) fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors")
}

/// Returns true if the file is one that each save writes with the weights.
pub(crate) fn is_settings(name: &str) -> bool {
    [ADAPTER_CONFIG, MODEL_CONFIG, INDEX_FILE].contains(&name)
}

/// Returns true if the file is published with any content.
pub(crate) fn is_published(name: &str) -> bool {
    is_weights(name) || is_settings(name) || ADAPTER_SIDE_FILES.contains(&name)
}

/// Returns true if the file is written by `torch.save`.
pub(crate) fn is_torch(name: &str) -> bool {
    [".pt", ".pth", ".bin"].iter().any(|ending| name.ends_with(ending))
}
