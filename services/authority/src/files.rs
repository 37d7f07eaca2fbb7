//! Files that are there whole or not at all, and secrets that only their owner reads.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

/// Longer than any key, token or certificate of ours.
const BYTES_MAX: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{} holds secrets, and others may read it (mode {mode:o}); `chmod go-rwx` it, and replace \
         the secrets if somebody did (K111)",
        path.display()
    )]
    Open { path: PathBuf, mode: u32 },
}

/// Nobody but its owner may look into it.
pub(crate) fn private_directory(path: &Path) -> Result<(), FileError> {
    let failed = |source| FileError::Write { path: path.to_owned(), source };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
    // One that was there keeps its files, and loses its visitors.
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(failed)
}

pub(crate) fn write_secret(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    write(path, bytes, 0o600)
}

pub(crate) fn write_public(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    write(path, bytes, 0o644)
}

fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), FileError> {
    let whole = || {
        let partial = path.with_extension("partial");
        // One that is left over may be somebody's to read.
        let _ = fs::remove_file(&partial);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&partial)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(partial, path)
    };
    whole().map_err(|source| FileError::Write { path: path.to_owned(), source })
}

/// Held until it is dropped; ends with the process.
pub(crate) fn lock(directory: &Path) -> Result<File, FileError> {
    let path = directory.join("lock");
    let locked = || {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path)?;
        file.lock()?;
        Ok(file)
    };
    locked().map_err(|source| FileError::Write { path: path.clone(), source })
}

/// A secret, unless others could have read it.
pub(crate) fn read_secret(path: &Path) -> Result<String, FileError> {
    let failed = |source| FileError::Read { path: path.to_owned(), source };
    let mode = fs::metadata(path).map_err(failed)?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(FileError::Open { path: path.to_owned(), mode });
    }
    read(path)
}

pub(crate) fn read(path: &Path) -> Result<String, FileError> {
    let text = || {
        if fs::metadata(path)?.len() > BYTES_MAX {
            return Err(io::Error::other("it is too large to be one of ours"));
        }
        fs::read_to_string(path)
    };
    text().map_err(|source| FileError::Read { path: path.to_owned(), source })
}
