//! The files that a spec names: local files beside the spec, or files attached to the call.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use bytes::Bytes;

/// 1 GiB; for prompts, examples or text.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// Names of a directory that are compared with the name of a missing file.
const LISTED_FILES_MAX: usize = 1000;

/// The source of the files that a spec names.
#[derive(Debug, Clone)]
pub enum SpecFiles {
    /// Paths relative to this directory.
    Local(PathBuf),
    /// Contents that were sent with the call, by name.
    Attached(BTreeMap<String, Bytes>),
}

/// The reason why a file of a spec cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SpecFileError {
    #[error("read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "there is no file {path}; a spec names files relative to its own directory{similar} (F101)"
    )]
    Missing { path: PathBuf, similar: String },
    #[error("{path} is a directory; name a file in it (F101)")]
    Directory { path: PathBuf },
    #[error("{path} has {bytes} bytes, the limit is {FILE_BYTES_MAX} (D105)")]
    TooLarge { path: PathBuf, bytes: u64 },
    #[error("file {0:?} is not attached to the call; add it to `files` (R108)")]
    NotAttached(String),
    #[error(
        "{0:?} would be found on the caller's machine: submit with `flotilla run submit` there, or \
         name a directory of the store as store:PATH (R108)"
    )]
    NotLocal(String),
}

impl SpecFiles {
    pub(crate) async fn read(&self, name: &str) -> Result<Bytes, SpecFileError> {
        match self {
            Self::Attached(files) => {
                files.get(name).cloned().ok_or_else(|| SpecFileError::NotAttached(name.into()))
            }
            Self::Local(directory) => read_local_file(&directory.join(name)).await,
        }
    }

    /// Fails with [`SpecFileError::NotLocal`] if the files came with the call.
    pub(crate) fn resolve_directory(&self, name: &str) -> Result<PathBuf, SpecFileError> {
        match self {
            Self::Attached(_) => Err(SpecFileError::NotLocal(name.into())),
            Self::Local(directory) => Ok(directory.join(name)),
        }
    }
}

async fn read_local_file(path: &Path) -> Result<Bytes, SpecFileError> {
    let failed = |source: std::io::Error| match source.kind() {
        std::io::ErrorKind::NotFound => {
            SpecFileError::Missing { path: path.to_owned(), similar: suggest_file(path) }
        }
        _ => SpecFileError::Read { path: path.to_owned(), source },
    };
    let metadata = tokio::fs::metadata(path).await.map_err(failed)?;
    if metadata.is_dir() {
        return Err(SpecFileError::Directory { path: path.to_owned() });
    }
    let bytes = metadata.len();
    if bytes > FILE_BYTES_MAX {
        return Err(SpecFileError::TooLarge { path: path.to_owned(), bytes });
    }
    Ok(tokio::fs::read(path).await.map_err(failed)?.into())
}

/// Returns the rest of a sentence: the file in the directory whose name is most similar, if any is.
pub fn suggest_file(path: &Path) -> String {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let entries = std::fs::read_dir(directory.unwrap_or(Path::new(".")));
    let names = entries.into_iter().flatten().flatten().take(LISTED_FILES_MAX);
    let names: Vec<String> =
        names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let wanted = path.file_name().unwrap_or_default().to_string_lossy();
    match spec::find_similar(&wanted, names.iter().map(String::as_str)) {
        Some(name) => format!("; did you mean {name}?"),
        None => String::new(),
    }
}
