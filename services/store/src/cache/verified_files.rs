//! Files that this process has hashed, with their size and modification time at that moment.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use wire::Digest;

use crate::file_hashing;

/// Largest number of remembered files; forgetting one only costs another hash.
const RECORDS_MAX: usize = 100_000;

/// Files that this process has hashed.
#[derive(Default)]
pub(crate) struct VerifiedFiles {
    /// Size, time and digest by inode.
    records: Mutex<BTreeMap<InodeKey, FileStamp>>,
}

/// Device and inode number.
type InodeKey = (u64, u64);

/// The state of a file when it was verified.
#[derive(Clone, Copy, PartialEq)]
struct FileStamp {
    digest: Digest,
    bytes: u64,
    /// Modification time in seconds and nanoseconds. New links and access times, which the cache
    /// sets itself, do not change it.
    modified: (i64, i64),
}

impl VerifiedFiles {
    /// Records a file whose bytes were just verified.
    pub(crate) fn record_file(&self, file: &File, digest: Digest) -> io::Result<()> {
        let (inode, stamp) = read_stamp(file, digest)?;
        let mut noted = self.lock_records();
        if noted.len() >= RECORDS_MAX {
            noted.clear();
        }
        noted.insert(inode, stamp);
        Ok(())
    }

    /// Returns true if a file has the given size and digest. Hashes the file unless this process
    /// has done so and it has not changed since. Blocking.
    pub(crate) fn is_intact(&self, file: &File, digest: Digest, bytes: u64) -> io::Result<bool> {
        let (inode, stamp) = read_stamp(file, digest)?;
        if stamp.bytes != bytes {
            return Ok(false);
        }
        let known = self.lock_records().get(&inode).copied();
        if known == Some(stamp) {
            return Ok(true);
        }
        let (found, count, _) = file_hashing::hash_open_file(file, &|_| ())?;
        let intact = (found, count) == (digest, bytes);
        if intact {
            self.record_file(file, digest)?;
        }
        Ok(intact)
    }

    /// Locks the records.
    fn lock_records(&self) -> MutexGuard<'_, BTreeMap<InodeKey, FileStamp>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the inode, size and modification time of a file, and combines them with a digest.
fn read_stamp(file: &File, digest: Digest) -> io::Result<(InodeKey, FileStamp)> {
    let meta = file.metadata()?;
    let modified = (meta.mtime(), meta.mtime_nsec());
    Ok(((meta.dev(), meta.ino()), FileStamp { digest, bytes: meta.len(), modified }))
}
