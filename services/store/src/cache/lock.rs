//! Locks that processes of one host share: `flock`, which the kernel releases when the
//! process dies. Files and directories are locked themselves, so there is nothing to clean.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::store::blocking;

const FIRST_WAIT: Duration = Duration::from_millis(5);
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// The exclusive right to fetch something, on this host.
#[derive(Debug)]
pub(crate) struct Flight {
    path: PathBuf,
    _file: File,
}

impl Flight {
    /// Polls, for a thread blocked in `flock` could not be cancelled. Cancel-safe.
    pub(crate) async fn board(path: &Path) -> io::Result<Self> {
        let mut wait = FIRST_WAIT;
        loop {
            let tried = path.to_owned();
            if let Some(flight) = blocking(move || Self::try_board(tried)).await? {
                return Ok(flight);
            }
            tokio::time::sleep(wait).await;
            wait = LONGEST_WAIT.min(wait * 2);
        }
    }

    fn try_board(path: PathBuf) -> io::Result<Option<Self>> {
        let file = File::options().create(true).truncate(false).write(true).open(&path)?;
        // The former holder may have removed the file between our open and our lock.
        let ours = try_exclusive(&file)? && is_at(&file, &path)?;
        // Lazily: dropping a flight removes its file, which here is another's.
        Ok(ours.then(|| Self { path, _file: file }))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        // Still locked, so nobody else can be using this file.
        let _ = fs::remove_file(&self.path);
    }
}

/// Opens a file or directory and keeps it from eviction; `None` when it is not there.
pub(crate) fn share(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        // Waits only for an eviction, which holds its lock for one rename.
        file.lock_shared()?;
        if is_at(&file, path)? {
            return Ok(Some(file));
        }
    }
}

pub(crate) fn try_exclusive(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Whether the path still leads to the file that was opened.
pub(crate) fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(there) => Ok((there.dev(), there.ino()) == (opened.dev(), opened.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
