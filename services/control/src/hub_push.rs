//! Pushes of checkpoints to the hub, with their model cards.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use formats::{SIDE_FILES, peft};
use hub::{ModelId, PushOutcome, PushRequest, PushTarget, SentCallback, UploadFile};

use crate::{FleetControl, adapter_model::name_base, model_card::ModelCard, push_error::PushError};

const CARD_FILE: &str = "README.md";
const GGUF_END: &str = ".gguf";

/// Files to push, and their card.
pub struct ModelPush<'a> {
    pub target: &'a PushTarget,
    /// The push writes the card there.
    pub directory: &'a Path,
    pub card: &'a ModelCard,
    pub message: &'a str,
    pub sent: SentCallback,
}

impl FleetControl {
    /// Reads the branch to push to, as [`hub::HubClient::open_push`] does.
    ///
    /// # Errors
    /// There is no token, the hub refuses it, or the repository is public and should be private.
    pub async fn open_push(&self, id: &ModelId, is_private: bool) -> Result<PushTarget, PushError> {
        Ok(self.hub.open_push(id, is_private).await?)
    }

    /// Pushes the files of a directory and a card in one commit. Removes the files of a model in
    /// another form from the branch. The settings of an adapter name its base as the hub does.
    ///
    /// # Errors
    /// A file cannot be read or written, or the hub does not accept the push; the branch is as it
    /// was then.
    pub async fn push_model(&self, push: &ModelPush<'_>) -> Result<PushOutcome, PushError> {
        let ModelPush { target, directory, card, message, sent } = push;
        if let Some(base) = &card.base {
            let path = directory.join(peft::CONFIG_FILE);
            let named = fs::read_to_string(&path).map(|settings| name_base(&settings, base));
            named
                .and_then(|named| fs::write(&path, named))
                .map_err(|source| PushError::File { path, source })?;
        }
        let path = directory.join(CARD_FILE);
        fs::write(&path, &card.text).map_err(|source| PushError::File { path, source })?;
        let files = list_files(directory);
        let files =
            files.map_err(|source| PushError::File { path: directory.to_path_buf(), source })?;
        let has_gguf = files.iter().any(|file| file.name.ends_with(GGUF_END));
        let request = PushRequest {
            message,
            files: &files,
            is_replaced: if has_gguf { is_weights_file } else { is_model_file },
            sent: sent.clone(),
        };
        Ok(self.hub.push_files(target, &request).await?)
    }
}

/// Returns true for a file of a model in the formats of Hugging Face.
fn is_weights_file(name: &str) -> bool {
    ["config.json", peft::CONFIG_FILE].contains(&name)
        || SIDE_FILES.contains(&name)
        || [".safetensors", ".safetensors.index.json"].iter().any(|end| name.ends_with(end))
}

/// Returns true for a file of a model in any format. GGUF files may be beside each other, but not
/// beside a model in another format.
fn is_model_file(name: &str) -> bool {
    is_weights_file(name) || name.ends_with(GGUF_END) || name == "Modelfile"
}

/// Returns the files below a directory by their paths in it, without hidden ones.
fn list_files(directory: &Path) -> io::Result<Vec<UploadFile>> {
    let (mut files, mut open) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(below) = open.pop() {
        for entry in fs::read_dir(directory.join(&below))? {
            let entry = entry?;
            let name = entry.file_name();
            if name.to_string_lossy().starts_with('.') {
                continue;
            }
            let path = below.join(name);
            if entry.file_type()?.is_dir() {
                open.push(path);
            } else {
                let name = path.display().to_string();
                files.push(UploadFile { name, source: directory.join(&path) });
            }
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_push_replaces_the_files_of_another_form() {
        for (name, in_gguf_push, in_other_push) in [
            ("adapter_config.json", true, true),
            ("model-00001-of-00002.safetensors", true, true),
            ("tokenizer.json", true, true),
            ("raft-1-Q8_0.gguf", false, true),
            ("README.md", false, false),
            ("notes/results.txt", false, false),
        ] {
            assert_eq!(is_weights_file(name), in_gguf_push, "{name}");
            assert_eq!(is_model_file(name), in_other_push, "{name}");
        }
    }
}
