//! Writes of a file into a store that is a directory. The file is copied beside its target, and the
//! copy is renamed when it is complete, verified and on disk.

use std::{
    fs::{self, File},
    io,
    path::{Path as FsPath, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use object_store::path::Path;
use wire::Digest;

use super::{FileChanged, changed_error, read_error};
use crate::{
    error::{PutError, StorageError},
    file_hashing,
    parts::PartHashes,
    store::{Store, run_blocking},
};

/// The path of an unfinished copy, which is removed on drop unless it was renamed.
struct StagedFile(PathBuf);

impl Drop for StagedFile {
    fn drop(&mut self) {
        // After a rename there is nothing left to remove.
        let _ = fs::remove_file(&self.0);
    }
}

impl Store {
    /// Copies a file into the directory of the store and returns its part hashes.
    pub(super) async fn put_local_copy(
        &self,
        path: &FsPath,
        target: PathBuf,
        key: &Path,
        (digest, bytes): (Digest, u64),
    ) -> Result<Option<PartHashes>, PutError> {
        let (from, url) = (path.to_owned(), self.backend.object_url(key));
        let copied = run_blocking(move || {
            let source = File::open(&from).map_err(read_error(&from))?;
            let fault = |source| PutError::from(StorageError::from_io(url.clone(), source));
            let (to, staged) = create_staged(&target).map_err(fault)?;
            let (found, count, parts) = file_hashing::copy_and_hash(&source, &to).map_err(fault)?;
            if (found, count) != (digest, bytes) {
                return Err(changed_error(&from)(FileChanged));
            }
            commit_staged(&to, &staged, &target).map_err(fault)?;
            Ok(parts)
        });
        copied.await
    }
}

/// Creates an empty file beside its target. Its name ends in `#` and digits, which `object_store`
/// leaves out of listings.
fn create_staged(target: &FsPath) -> io::Result<(File, StagedFile)> {
    let staged = staging_path(target);
    let create = || File::options().read(true).write(true).create_new(true).open(&staged);
    let file = match create() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(target.parent().unwrap_or(target))?;
            create()?
        }
        file => file?,
    };
    Ok((file, StagedFile(staged)))
}

/// Returns a unique path beside `target` for a staged file: the name of the target, `#` and digits.
fn staging_path(target: &FsPath) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut name = target.as_os_str().to_owned();
    name.push(format!("#{}{now}{next}", process::id()));
    PathBuf::from(name)
}

/// Makes `target` a hard link to a file, and replaces an existing target atomically. If both paths
/// already are the same file, a rename does nothing; the staged link is then removed, which the
/// copy of `object_store` does not do.
pub(crate) fn link_file(from: &FsPath, target: &FsPath) -> io::Result<()> {
    let staged = StagedFile(staging_path(target));
    match fs::hard_link(from, &staged.0) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && from.exists() => {
            fs::create_dir_all(target.parent().unwrap_or(target))?;
            fs::hard_link(from, &staged.0)?;
        }
        linked => linked?,
    }
    fs::rename(&staged.0, target)?;
    File::open(target.parent().unwrap_or(target))?.sync_all()
}

/// Renames a copy to its target, and syncs the file and its directory.
fn commit_staged(file: &File, staged: &StagedFile, target: &FsPath) -> io::Result<()> {
    file.sync_all()?;
    fs::rename(&staged.0, target)?;
    File::open(target.parent().unwrap_or(target))?.sync_all()
}
