//! Leftovers of uploads that were refused, interrupted or killed: found by their age, reported and
//! removed.
//!
//! In a directory these are staged files beside their objects and in `.door/uploads`. In a bucket
//! they are multipart uploads; known are only those that a gateway or this user began.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path as FsPath, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::{
    blocking::run_blocking,
    error::StorageError,
    internal_directory::uploads_directory,
    manifest::{MANIFEST, SUMS_FILE},
    parts::PARTS_FILE,
    store::Store,
};

/// The age after which an unfinished upload is abandoned, counted from its last byte. No client
/// resumes an upload after 24 hours, and no staged file waits longer for its final name.
pub const LEFTOVER_AGE: Duration = Duration::from_secs(24 * 3600);
/// A factor on the age for uploads into a bucket, which counts from their start.
pub(crate) const BUCKET_AGE_FACTOR: u32 = 3;
/// The largest number of entries that one search visits.
const ENTRIES_MAX: u64 = 2_000_000;

/// Directories that contain only files of the store: each staging name in them is a leftover.
const OWNED_DIRECTORIES: [&str; 3] = ["runs", "blobs", "models"];
/// Files that the store adds to directories that other programs copied into it.
const OWN_FILES: [&str; 3] = [MANIFEST, SUMS_FILE, PARTS_FILE];

/// Number and size of the leftovers of unfinished uploads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UploadLeftovers {
    /// The number of files in a directory, or of uploads into a bucket.
    pub count: u64,
    /// The disk usage in bytes; 0 for a bucket, which does not report it.
    pub bytes: u64,
}

impl UploadLeftovers {
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn add(&mut self, other: Self) {
        self.count += other.count;
        self.bytes += other.bytes;
    }
}

impl Store {
    /// Counts the leftovers of uploads without activity for `age`. Counts none in a store that is
    /// reached through a gateway, because the gateway searches it itself.
    pub async fn find_leftovers(&self, age: Duration) -> Result<UploadLeftovers, StorageError> {
        match self.local_root() {
            Some(root) => self.scan_local_root(root, age, false).await,
            None => {
                self.objects_by_key().find_abandoned_uploads(age * BUCKET_AGE_FACTOR, false).await
            }
        }
    }

    /// Removes the leftovers of uploads without activity for `age`, and aborts multipart uploads
    /// that this user began and abandoned. Returns the number and size of what was removed. Files
    /// that cannot be removed are logged and skipped.
    pub async fn remove_leftovers(&self, age: Duration) -> Result<UploadLeftovers, StorageError> {
        let mut removed = match self.local_root() {
            Some(root) => self.scan_local_root(root, age, true).await?,
            None => {
                self.objects_by_key().find_abandoned_uploads(age * BUCKET_AGE_FACTOR, true).await?
            }
        };
        let count = self.abort_abandoned_uploads().await;
        removed.add(UploadLeftovers { count, bytes: 0 });
        if !removed.is_empty() {
            let UploadLeftovers { count, bytes } = removed;
            tracing::info!(count, bytes, store = self.url(), "removed the leftovers of uploads");
        }
        Ok(removed)
    }

    async fn scan_local_root(
        &self,
        root: PathBuf,
        age: Duration,
        remove: bool,
    ) -> Result<UploadLeftovers, StorageError> {
        let walked = run_blocking(move || {
            let mut walk =
                LeftoverScan { age, remove, left: ENTRIES_MAX, found: UploadLeftovers::default() };
            walk.scan_root(&root)?;
            if walk.left == 0 {
                let directory = root.display();
                tracing::warn!(%directory, "not all of the store was searched for leftovers");
            }
            Ok(walk.found)
        });
        walked.await.map_err(|source| StorageError::from_io(self.backend.url.clone(), source))
    }

    fn local_root(&self) -> Option<PathBuf> {
        self.backend.local.as_ref()?;
        self.backend.url.strip_prefix("file://").map(PathBuf::from)
    }
}

struct LeftoverScan {
    age: Duration,
    remove: bool,
    left: u64,
    found: UploadLeftovers,
}

impl LeftoverScan {
    fn scan_root(&mut self, root: &FsPath) -> io::Result<()> {
        self.scan_below(&uploads_directory(root), &|_| true)?;
        let Some(entries) = read_entries(root)? else { return Ok(()) };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| !name.starts_with('.')) else { continue };
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if !is_directory {
                // Staged files of an access check, or of a root directory that was registered in
                // place.
                self.process_entry(&entry, &is_own_staging_name);
            } else if OWNED_DIRECTORIES.contains(&name) {
                self.scan_below(&entry.path(), &is_staging_name)?;
            } else {
                self.scan_below(&entry.path(), &is_own_staging_name)?;
            }
        }
        Ok(())
    }

    /// Searches a tree of directories. Does not follow links, which lead out of the store.
    fn scan_below(&mut self, top: &FsPath, is_left: &dyn Fn(&str) -> bool) -> io::Result<()> {
        let mut directories = vec![top.to_owned()];
        while let Some(directory) = directories.pop() {
            let Some(entries) = read_entries(&directory)? else { continue };
            for entry in entries {
                let Some(left) = self.left.checked_sub(1) else { return Ok(()) };
                self.left = left;
                let entry = entry?;
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    directories.push(entry.path());
                } else {
                    self.process_entry(&entry, is_left);
                }
            }
        }
        Ok(())
    }

    fn process_entry(&mut self, entry: &fs::DirEntry, is_left: &dyn Fn(&str) -> bool) {
        let name = entry.file_name();
        if !name.to_str().is_some_and(is_left) {
            return;
        }
        // Another process has renamed or removed the file since the directory was read.
        let Ok(meta) = entry.metadata() else { return };
        if !meta.is_file() || activity_time(&meta).elapsed().unwrap_or_default() < self.age {
            return;
        }
        if self.remove
            && let Err(error) = fs::remove_file(entry.path())
        {
            let path = entry.path();
            tracing::warn!(%error, path = %path.display(), "could not remove the leftovers of an \
                                                            upload");
            return;
        }
        // A file with another hard link takes no space under this name.
        let bytes = if meta.nlink() > 1 { 0 } else { meta.len().min(meta.blocks() * 512) };
        self.found.add(UploadLeftovers { count: 1, bytes });
    }
}

fn read_entries(directory: &FsPath) -> io::Result<Option<fs::ReadDir>> {
    match fs::read_dir(directory) {
        Ok(entries) => Ok(Some(entries)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the time of the last write. A new hard link has the write time of the old file, so for a
/// file with several links the inode's change time counts if it is later.
pub(crate) fn activity_time(meta: &fs::Metadata) -> SystemTime {
    let written = meta.modified().unwrap_or_else(|_| SystemTime::now());
    let seconds = u64::try_from(meta.ctime()).unwrap_or_default();
    let named = UNIX_EPOCH + Duration::from_secs(seconds);
    if meta.nlink() > 1 { written.max(named) } else { written }
}

fn is_staging_name(name: &str) -> bool {
    final_name(name).is_some()
}

fn is_own_staging_name(name: &str) -> bool {
    final_name(name).is_some_and(|name| OWN_FILES.contains(&name) || name.starts_with("check-"))
}

/// Returns the final name of a staged file, which is named `name#digits`.
fn final_name(name: &str) -> Option<&str> {
    let (name, number) = name.rsplit_once('#')?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then_some(name)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn only_names_that_no_object_has_are_leftovers() {
        for name in ["manifest.json#0", "weights#123", "check-1-2#1"] {
            assert!(is_staging_name(name), "{name}");
        }
        for name in ["manifest.json", "a#b", "a#", "#1x", "a#1.json"] {
            assert!(!is_staging_name(name), "{name}");
        }
        assert!(is_own_staging_name("manifest.json#0") && !is_own_staging_name("weights#123"));
    }

    #[tokio::test]
    async fn old_leftovers_are_removed_and_new_files_and_those_of_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&format!("file://{}", dir.path().display())).await.unwrap();
        let old = SystemTime::now() - 2 * LEFTOVER_AGE;
        let make = |name: &str, age: SystemTime| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, [7; 4096]).unwrap();
            File::options().write(true).open(&path).unwrap().set_modified(age).unwrap();
            path
        };
        let removed = [
            "runs/r/checkpoints/c0-s1-00/manifest.json#0",
            "blobs/ab/abcd#4219",
            ".door/uploads/0-1-2",
            "mine/B3SUMS#1",
        ];
        let removed = removed.map(|name| make(name, old));
        let mut stay = vec![
            make("runs/r/checkpoints/c0-s1-00/manifest.json", old),
            make("runs/r/checkpoints/c0-s1-00/manifest.json#1", SystemTime::now()),
            make(".door/uploads/0-1-3", SystemTime::now()),
            make(".door/identity", old),
            make("mine/notes#1", old),
        ];
        // As a copy within the store: old bytes under a new name.
        let copying = dir.path().join("blobs/ab/other#0");
        fs::hard_link(&stay[0], &copying).unwrap();
        stay.push(copying);
        let found = store.find_leftovers(LEFTOVER_AGE).await.unwrap();
        assert_eq!(found, UploadLeftovers { count: 4, bytes: 4 * 4096 });
        assert_eq!(store.remove_leftovers(LEFTOVER_AGE).await.unwrap(), found);
        assert!(removed.iter().all(|path| !path.exists()));
        assert!(stay.iter().all(|path| path.exists()));
        assert!(store.find_leftovers(LEFTOVER_AGE).await.unwrap().is_empty());
    }
}
