//! The files that a spec names: local files beside the spec, or files attached to the call. Files
//! that a user names in a command are read in the same way.

use std::{
    collections::BTreeMap,
    fs::Metadata,
    io,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use hub::DatasetName;
use spec::HUB_PREFIX;

/// 1 GiB; for prompts, examples or text.
pub(crate) const FILE_BYTES_MAX: u64 = 1 << 30;

/// Names of a directory that are compared with the name of a missing file.
const LISTED_FILES_MAX: usize = 1000;

/// The source of the files that a spec names.
#[derive(Debug, Clone)]
pub enum SpecFiles {
    /// Paths relative to this directory.
    Local(PathBuf),
    /// Contents that were sent with the call, by name.
    Attached(BTreeMap<String, Bytes>),
    /// Contents by name, and other files.
    Overlaid(BTreeMap<String, Bytes>, Box<SpecFiles>),
}

/// The reason why a file of a spec cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SpecFileError {
    #[error("read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("there is no file {path}{remedy} (F101)")]
    Missing { path: PathBuf, remedy: String },
    #[error("{path} is a directory; name a file in it (F101)")]
    Directory { path: PathBuf },
    #[error("{path} has {bytes} bytes, the limit is {FILE_BYTES_MAX} (D105)")]
    TooLarge { path: PathBuf, bytes: u64 },
    #[error("there is no file {0:?} with this spec; check its name, or attach it (R108)")]
    NotAttached(String),
    #[error(
        "{0:?} would be found on the caller's machine: submit with `flotilla run submit` there, or \
         name a directory of the store as store:PATH (R123)"
    )]
    NotLocal(String),
}

impl SpecFiles {
    pub(crate) async fn read(&self, name: &str) -> Result<Bytes, SpecFileError> {
        match self {
            Self::Attached(files) => {
                files.get(name).cloned().ok_or_else(|| SpecFileError::NotAttached(name.into()))
            }
            Self::Local(directory) => read_local_file(directory, name).await,
            Self::Overlaid(attached, others) => match attached.get(name) {
                Some(content) => Ok(content.clone()),
                None => Box::pin(others.read(name)).await,
            },
        }
    }

    /// Returns these files with others added; a content that is attached already stays.
    pub(crate) fn with_attached(&self, contents: BTreeMap<String, Bytes>) -> Self {
        if contents.is_empty() {
            return self.clone();
        }
        Self::Overlaid(contents, Box::new(self.clone()))
    }

    pub(crate) fn has_attached(&self, name: &str) -> bool {
        match self {
            Self::Local(_) => false,
            Self::Attached(files) => files.contains_key(name),
            Self::Overlaid(attached, others) => {
                attached.contains_key(name) || others.has_attached(name)
            }
        }
    }

    /// Fails with [`SpecFileError::NotLocal`] if the files came with the call.
    pub(crate) fn resolve_directory(&self, name: &str) -> Result<PathBuf, SpecFileError> {
        match self {
            Self::Attached(_) => Err(SpecFileError::NotLocal(name.into())),
            Self::Local(directory) => Ok(directory.join(name)),
            Self::Overlaid(_, others) => others.resolve_directory(name),
        }
    }
}

async fn read_local_file(directory: &Path, name: &str) -> Result<Bytes, SpecFileError> {
    let path = &directory.join(name);
    let own = "; a spec names files relative to its own directory";
    let hint = format!("{own}{}", suggest_dataset(name));
    let bytes = file_size(path, tokio::fs::metadata(path).await, &hint)?;
    check_size(path, bytes)?;
    let read = tokio::fs::read(path).await;
    Ok(read.map_err(|source| SpecFileError::Read { path: path.to_owned(), source })?.into())
}

/// Reads a file that a user named.
pub fn read_named_file(path: &Path) -> Result<Bytes, SpecFileError> {
    read_with_hint(path, "")
}

/// Reads a file that a user named where a data set of the hub may stand too.
pub(crate) fn read_named_data(path: &Path) -> Result<Bytes, SpecFileError> {
    read_with_hint(path, &suggest_dataset(&path.to_string_lossy()))
}

fn read_with_hint(path: &Path, hint: &str) -> Result<Bytes, SpecFileError> {
    check_size(path, file_size(path, std::fs::metadata(path), hint)?)?;
    let read = std::fs::read(path);
    Ok(read.map_err(|source| SpecFileError::Read { path: path.to_owned(), source })?.into())
}

/// Requires that a path that a user named is there and is no directory.
pub fn require_named_file(path: &Path) -> Result<(), SpecFileError> {
    file_size(path, std::fs::metadata(path), "").map(drop)
}

/// Returns the size of a file in bytes. `hint` follows the name of one that is missing.
fn file_size(path: &Path, found: io::Result<Metadata>, hint: &str) -> Result<u64, SpecFileError> {
    match found {
        Ok(metadata) if metadata.is_dir() => {
            Err(SpecFileError::Directory { path: path.to_owned() })
        }
        Ok(metadata) => Ok(metadata.len()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let remedy = format!("{hint}{}", suggest_file(path));
            Err(SpecFileError::Missing { path: path.to_owned(), remedy })
        }
        Err(source) => Err(SpecFileError::Read { path: path.to_owned(), source }),
    }
}

fn check_size(path: &Path, bytes: u64) -> Result<(), SpecFileError> {
    match bytes {
        0..=FILE_BYTES_MAX => Ok(()),
        _ => Err(SpecFileError::TooLarge { path: path.to_owned(), bytes }),
    }
}

/// Returns the rest of a sentence: how to name the data set, for the name of one without the
/// prefix. A name that ends as those of files do is none; `1.5` may end that of a data set.
fn suggest_dataset(name: &str) -> String {
    let ending = Path::new(name).extension().unwrap_or_default().to_string_lossy();
    let is_file = ending.starts_with(|first: char| !first.is_ascii_digit());
    if is_file || name.parse::<DatasetName>().is_err() {
        return String::new();
    }
    format!("; a data set of the hub is written {HUB_PREFIX}{name}")
}

/// Returns the rest of a sentence: the file in the directory whose name is most similar, if any is.
fn suggest_file(path: &Path) -> String {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let entries = std::fs::read_dir(directory.unwrap_or(Path::new(".")));
    let names = entries.into_iter().flatten().flatten().take(LISTED_FILES_MAX);
    let names: Vec<String> =
        names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let wanted = path.file_name().unwrap_or_default().to_string_lossy();
    // Names of the same kind resemble each other by their ends alone.
    let stem = |name: &str| name.split_once('.').map_or(name, |(stem, _)| stem).to_owned();
    let is_similar = |name: &&str| spec::find_similar(&stem(&wanted), [&*stem(name)]).is_some();
    let candidates = names.iter().map(String::as_str).filter(is_similar);
    match spec::find_similar(&wanted, candidates) {
        Some(name) => format!("; did you mean {name}?"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_and_a_directory_are_refused_with_a_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let there = directory.path().join("prompts.jsonl");
        std::fs::write(&there, "{}").unwrap();
        assert_eq!(read_named_file(&there).unwrap(), "{}");
        require_named_file(&there).unwrap();
        let refused = |path: &Path| {
            let error = require_named_file(path).unwrap_err().to_string();
            assert_eq!(error, read_named_file(path).unwrap_err().to_string());
            error
        };
        let missing = refused(&directory.path().join("prompt.jsonl"));
        assert!(missing.contains("there is no file /"), "{missing}");
        assert!(missing.ends_with("prompt.jsonl; did you mean prompts.jsonl? (F101)"), "{missing}");
        let other = refused(&directory.path().join("nope.jsonl"));
        assert!(other.ends_with("nope.jsonl (F101)"), "{other}");
        let named = refused(directory.path());
        assert!(named.ends_with("is a directory; name a file in it (F101)"), "{named}");
    }

    #[tokio::test]
    async fn a_data_set_without_its_prefix_is_told_from_a_missing_file() {
        let directory = tempfile::tempdir().unwrap();
        let files = SpecFiles::Local(directory.path().to_owned());
        for name in ["openai/gsm8k", "openai/gsm8k:test", "org/set-v1.5@main:main/train"] {
            let error = files.read(name).await.unwrap_err().to_string();
            let ending = format!("a data set of the hub is written hub:{name} (F101)");
            assert!(error.ends_with(&ending), "{error}");
            let error = read_named_data(Path::new(name)).unwrap_err().to_string();
            assert!(error.ends_with(&ending), "{error}");
        }
        for name in ["data/prompts.jsonl", "texts/eval.txt", "prompts", "data/sets/prompts"] {
            let error = files.read(name).await.unwrap_err().to_string();
            assert!(!error.contains("hub:"), "{error}");
        }
    }
}
