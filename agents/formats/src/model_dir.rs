//! A Hugging Face model directory: its location and its files.

mod model_lookup;

pub use model_lookup::{HubCache, find_model};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The reason why a model directory or its weight files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelDirError {
    #[error("could not read {path}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{path} does not list the weight files; download it again (M101)")]
    Index { path: PathBuf, source: Option<serde_json::Error> },
    #[error("{index} names {missing}, absent from the directory; download the model again (M101)")]
    MissingShards { index: PathBuf, missing: String },
    #[error(
        "{dir} has its weights only as {found}; save them as safetensors (transformers: `AutoModelForCausalLM.from_pretrained(dir).save_pretrained(out)`) (M102)"
    )]
    Unconverted { dir: PathBuf, found: String },
    #[error(
        "{dir} has no weights: there is neither {dir}/model.safetensors nor an index of shards, model.safetensors.index.json (M101)"
    )]
    NoWeights { dir: PathBuf },
    #[error(
        "{path} is not a model directory: {path}/config.json is missing; name the directory of \
             a Hugging Face model (M101)"
    )]
    NoConfig { path: PathBuf },
    #[error("{path} is a file; name the directory of a Hugging Face model (M101)")]
    NotADirectory { path: PathBuf },
    #[error(
        "`{name}` is neither a directory nor the name of a model (`org/name[@revision]`) (H106)"
    )]
    Name { name: String },
    #[error(
        "`{name}` is neither a directory nor in {cache}; download it (`hf download {name}`) or \
         give a directory (H106)"
    )]
    NotDownloaded { name: String, cache: String },
    #[error("{path} has no revision `{revision}`; downloaded: {known} (H106)")]
    Revision { path: PathBuf, revision: String, known: String },
}

/// The weights of a model with one file.
pub const SINGLE_WEIGHTS_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
/// The files of a model besides its weights and `config.json`. The last two prepare images.
pub const SIDE_FILES: [&str; 11] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
];

/// One line for each tensor.
const INDEX_BYTES_MAX: u64 = 64 << 20;
const LISTED_NAMES_MAX: usize = 8;

/// Returns the paths of the weights, which all exist: the single file, or the shards that
/// `model.safetensors.index.json` names.
pub fn list_weight_files(dir: &Path) -> Result<Vec<PathBuf>, ModelDirError> {
    let names = list_weight_names(dir)?;
    let absent: Vec<&String> = names.iter().filter(|name| !dir.join(name).exists()).collect();
    let index = dir.join(INDEX_FILE);
    match join_names(&absent) {
        None => Ok(names.iter().map(|name| dir.join(name)).collect()),
        Some(missing) if index.exists() => Err(ModelDirError::MissingShards { index, missing }),
        Some(_) => Err(missing_weights_error(dir)),
    }
}

/// Returns the file names of the weights, sorted. The files need not exist yet; without an index it
/// is the single file.
pub fn list_weight_names(dir: &Path) -> Result<Vec<String>, ModelDirError> {
    let path = dir.join(INDEX_FILE);
    if !path.exists() {
        return Ok(vec![SINGLE_WEIGHTS_FILE.to_owned()]);
    }
    let text = read_bounded(&path, INDEX_BYTES_MAX)?;
    let index: Value = serde_json::from_str(&text)
        .map_err(|source| ModelDirError::Index { path: path.clone(), source: Some(source) })?;
    let map = index.get("weight_map").and_then(Value::as_object);
    let names = map.map(|map| map.values().filter_map(Value::as_str).collect::<BTreeSet<_>>());
    let plain = |name: &&str| Path::new(name).file_name() == Some(name.as_ref());
    match names {
        Some(names) if !names.is_empty() && names.iter().all(plain) => {
            Ok(names.into_iter().map(str::to_owned).collect())
        }
        _ => Err(ModelDirError::Index { path, source: None }),
    }
}

/// Names weights of other formats, if the directory has any.
fn missing_weights_error(dir: &Path) -> ModelDirError {
    let foreign = |name: &str| {
        let foreign = [".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack"];
        foreign.iter().any(|end| name.ends_with(end)) && name != "training_args.bin"
    };
    let found: Vec<String> = list_names(dir).into_iter().filter(|name| foreign(name)).collect();
    match join_names(&found) {
        Some(found) => ModelDirError::Unconverted { dir: dir.into(), found },
        None => ModelDirError::NoWeights { dir: dir.into() },
    }
}

/// Returns sorted names; none if the directory cannot be read.
fn list_names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Joins the first [`LISTED_NAMES_MAX`] names and counts the rest; `None` for an empty list.
fn join_names(names: &[impl AsRef<str>]) -> Option<String> {
    let first: Vec<&str> = names.iter().take(LISTED_NAMES_MAX).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(LISTED_NAMES_MAX) {
        _ if names.is_empty() => None,
        0 => Some(first.join(", ")),
        more => Some(format!("{} and {more} more", first.join(", "))),
    }
}

fn read_bounded(path: &Path, most: u64) -> Result<String, ModelDirError> {
    let text = crate::bounded_text::read_text(path, most);
    text.map_err(|source| ModelDirError::File { path: path.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, name: &str, text: &str) {
        std::fs::write(dir.join(name), text).unwrap();
    }

    fn refusal(dir: &Path) -> String {
        list_weight_files(dir).unwrap_err().to_string()
    }

    #[test]
    fn missing_shards_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let map = |last: usize| {
            let entry =
                |n: usize| (format!("t{n}"), Value::from(format!("model-{n:05}.safetensors")));
            serde_json::json!({"weight_map": (1..=last).map(entry).collect::<serde_json::Map<_, _>>()})
        };
        write(dir, INDEX_FILE, &map(3).to_string());
        write(dir, "model-00001.safetensors", "");
        write(dir, "model-00003.safetensors", "");
        assert!(refusal(dir).contains("names model-00002.safetensors, absent"), "{}", refusal(dir));
        write(dir, "model-00002.safetensors", "");
        assert_eq!(list_weight_files(dir).unwrap().len(), 3);
        write(dir, INDEX_FILE, &map(20).to_string());
        assert!(refusal(dir).contains("model-00011.safetensors and 9 more"), "{}", refusal(dir));
        for outside in ["../model.safetensors", "/etc/passwd", ".."] {
            write(dir, INDEX_FILE, &serde_json::json!({"weight_map": {"t": outside}}).to_string());
            assert!(refusal(dir).contains("does not list"), "{}", refusal(dir));
        }
    }

    #[test]
    fn weights_in_other_formats_are_named_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        write(dir, "training_args.bin", "");
        assert!(refusal(dir).contains("has no weights"), "{}", refusal(dir));
        write(dir, "pytorch_model-00001-of-00002.bin", "");
        assert!(refusal(dir).contains("only as pytorch_model-00001-of-00002.bin"));
        assert!(refusal(dir).contains("save_pretrained"));
        write(dir, SINGLE_WEIGHTS_FILE, "");
        assert_eq!(list_weight_files(dir).unwrap(), [dir.join(SINGLE_WEIGHTS_FILE)]);
    }
}
