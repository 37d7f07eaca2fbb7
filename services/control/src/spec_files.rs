//! The files that a spec names: local files beside the spec, or files attached to the call.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use bytes::Bytes;

/// 1 GiB; for prompts, examples or text.
const FILE_BYTES_MAX: u64 = 1 << 30;

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
    let failed = |source| SpecFileError::Read { path: path.to_owned(), source };
    let bytes = tokio::fs::metadata(path).await.map_err(failed)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(SpecFileError::TooLarge { path: path.to_owned(), bytes });
    }
    Ok(tokio::fs::read(path).await.map_err(failed)?.into())
}
