//! Writes files atomically, and keeps secrets readable by their owner only.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

const FILE_BYTES_MAX: u64 = 1 << 20;

/// The reason why a key file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
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
         the secrets if they were read (K111)",
        path.display()
    )]
    Open { path: PathBuf, mode: u32 },
}

/// Creates a directory that only its owner can access, or restricts an existing one.
pub(crate) fn create_private_directory(path: &Path) -> Result<(), KeyFileError> {
    let failed = |source| KeyFileError::Write { path: path.to_owned(), source };
    durable_files::create_directory(path, 0o700).map_err(failed)?;
    // An existing directory keeps its files; access of others ends.
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(failed)
}

pub(crate) fn write_secret(path: &Path, bytes: &[u8]) -> Result<(), KeyFileError> {
    write_atomic(path, bytes, 0o600)
}

pub(crate) fn write_public(path: &Path, bytes: &[u8]) -> Result<(), KeyFileError> {
    write_atomic(path, bytes, 0o644)
}

fn write_atomic(path: &Path, bytes: &[u8], mode: u32) -> Result<(), KeyFileError> {
    let written = durable_files::replace_file(path, bytes, mode);
    written.map_err(|source| KeyFileError::Write { path: path.to_owned(), source })
}

/// Locks a directory until the file is dropped; waits for the lock.
pub(crate) fn lock_directory(directory: &Path) -> Result<File, KeyFileError> {
    let path = directory.join("lock");
    let locked = || {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path)?;
        file.lock()?;
        Ok(file)
    };
    locked().map_err(|source| KeyFileError::Write { path: path.clone(), source })
}

/// Fails if others can read the file.
pub(crate) fn read_secret(path: &Path) -> Result<String, KeyFileError> {
    let failed = |source| KeyFileError::Read { path: path.to_owned(), source };
    let mode = fs::metadata(path).map_err(failed)?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(KeyFileError::Open { path: path.to_owned(), mode });
    }
    read_text(path)
}

pub(crate) fn read_text(path: &Path) -> Result<String, KeyFileError> {
    let text = || {
        if fs::metadata(path)?.len() > FILE_BYTES_MAX {
            return Err(io::Error::other("it is too large to be one of ours"));
        }
        fs::read_to_string(path)
    };
    text().map_err(|source| KeyFileError::Read { path: path.to_owned(), source })
}
