//! The files a spec names: beside the spec on this machine, or attached to the call.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use bytes::Bytes;

/// Largest prompts, data or eval file.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// Where the names in a spec lead.
#[derive(Debug, Clone)]
pub enum Files {
    /// Paths, relative to this directory.
    Local(PathBuf),
    /// Contents that came with the call.
    Attached(BTreeMap<String, Bytes>),
}

#[derive(Debug, thiserror::Error)]
pub enum FileError {
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

impl Files {
    pub(crate) async fn read(&self, name: &str) -> Result<Bytes, FileError> {
        match self {
            Self::Attached(files) => {
                files.get(name).cloned().ok_or_else(|| FileError::NotAttached(name.into()))
            }
            Self::Local(directory) => read_local(&directory.join(name)).await,
        }
    }

    pub(crate) fn directory(&self, name: &str) -> Result<PathBuf, FileError> {
        match self {
            Self::Attached(_) => Err(FileError::NotLocal(name.into())),
            Self::Local(directory) => Ok(directory.join(name)),
        }
    }
}

async fn read_local(path: &Path) -> Result<Bytes, FileError> {
    let failed = |source| FileError::Read { path: path.to_owned(), source };
    let bytes = tokio::fs::metadata(path).await.map_err(failed)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(FileError::TooLarge { path: path.to_owned(), bytes });
    }
    Ok(tokio::fs::read(path).await.map_err(failed)?.into())
}
