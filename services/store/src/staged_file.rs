//! Files that are written beside their target and renamed when they are complete and on disk.
//! Blocking.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use durable_files::{create_directory, sync_parent};

/// Limited by the umask.
const DIRECTORY_MODE: u32 = 0o777;

/// An unfinished file, which is removed on drop unless it was renamed.
pub(crate) struct StagedFile(PathBuf);

impl Drop for StagedFile {
    fn drop(&mut self) {
        // After a rename there is nothing left to remove.
        let _ = fs::remove_file(&self.0);
    }
}

/// Creates an empty file beside its target, under a name that `object_store` does not list.
pub(crate) fn create_staged(target: &Path) -> io::Result<(File, StagedFile)> {
    let staged = staging_path(target);
    let create = || File::options().read(true).write(true).create_new(true).open(&staged);
    let file = match create() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            create_directory(target.parent().unwrap_or(target), DIRECTORY_MODE)?;
            create()?
        }
        file => file?,
    };
    Ok((file, StagedFile(staged)))
}

/// Returns a unique path: the name of the target, `#` and digits.
fn staging_path(target: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = wire::clock::unix_time().as_nanos();
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut name = target.as_os_str().to_owned();
    name.push(format!("#{}{now}{next}", process::id()));
    PathBuf::from(name)
}

/// Makes `target` a hard link to a file, and replaces an existing target atomically. If both paths
/// already are the same file, the rename does nothing, and the staged link is removed.
pub(crate) fn link_file(from: &Path, target: &Path) -> io::Result<()> {
    let staged = StagedFile(staging_path(target));
    match fs::hard_link(from, &staged.0) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && from.exists() => {
            create_directory(target.parent().unwrap_or(target), DIRECTORY_MODE)?;
            fs::hard_link(from, &staged.0)?;
        }
        linked => linked?,
    }
    fs::rename(&staged.0, target)?;
    sync_parent(target)
}

/// Renames a file to its target, and syncs the file and its directory.
pub(crate) fn commit_staged(file: &File, staged: &StagedFile, target: &Path) -> io::Result<()> {
    file.sync_all()?;
    fs::rename(&staged.0, target)?;
    sync_parent(target)
}
