//! Locks that processes of one host share: `flock`, which the kernel releases when the process
//! dies. Files and directories are locked themselves, so there is nothing to clean up.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::blocking::run_blocking;

const FIRST_WAIT: Duration = Duration::from_millis(5);
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// The exclusive right to fetch one file or tree on this host, released on drop.
#[derive(Debug)]
pub(crate) struct FetchLock {
    path: PathBuf,
    _file: File,
}

impl FetchLock {
    /// Polls, because a thread that is blocked in `flock` could not be cancelled. Cancel-safe.
    pub(crate) async fn acquire_lock(path: &Path) -> io::Result<Self> {
        let mut wait = FIRST_WAIT;
        loop {
            let tried = path.to_owned();
            if let Some(lock) = run_blocking(move || Self::try_acquire(tried)).await? {
                return Ok(lock);
            }
            tokio::time::sleep(wait).await;
            wait = LONGEST_WAIT.min(wait * 2);
        }
    }

    /// Returns `None` if another task or process holds the lock. Blocking.
    fn try_acquire(path: PathBuf) -> io::Result<Option<Self>> {
        let file = File::options().create(true).truncate(false).write(true).open(&path)?;
        // The former holder may have removed the file between opening and locking it here.
        let ours = try_lock_exclusive(&file)? && is_same_file(&file, &path)?;
        // The value is built lazily: dropping a lock removes its file, which may belong to another
        // process here.
        Ok(ours.then(|| Self { path, _file: file }))
    }
}

impl Drop for FetchLock {
    fn drop(&mut self) {
        // The file is still locked, so no other process can be using it.
        let _ = fs::remove_file(&self.path);
    }
}

/// Opens a file or directory and protects it from eviction; returns `None` if it does not exist.
pub(crate) fn open_shared(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        // Waits only for an eviction, which holds its lock for one rename.
        file.lock_shared()?;
        if is_same_file(&file, path)? {
            return Ok(Some(file));
        }
    }
}

/// Returns false if the file is in use.
pub(crate) fn try_lock_exclusive(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

pub(crate) fn is_same_file(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(there) => Ok((there.dev(), there.ino()) == (opened.dev(), opened.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
