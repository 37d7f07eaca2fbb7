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

/// The largest number of remembered files; forgetting one only costs another hash.
const RECORDS_MAX: usize = 100_000;

#[derive(Default)]
pub(crate) struct VerifiedFiles {
    records: Mutex<BTreeMap<InodeKey, FileStamp>>,
}

type InodeKey = (u64, u64);

#[derive(Clone, Copy, PartialEq)]
struct FileStamp {
    digest: Digest,
    bytes: u64,
    /// New links and access times, which the cache sets itself, do not change this time.
    modified: (i64, i64),
}

impl VerifiedFiles {
    pub(crate) fn record_file(&self, file: &File, digest: Digest) -> io::Result<()> {
        let (inode, stamp) = read_stamp(file, digest)?;
        let mut noted = self.lock_records();
        if noted.len() >= RECORDS_MAX {
            noted.clear();
        }
        noted.insert(inode, stamp);
        Ok(())
    }

    /// Hashes the file unless this process has done so and it has not changed since. Blocking.
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

    fn lock_records(&self) -> MutexGuard<'_, BTreeMap<InodeKey, FileStamp>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read_stamp(file: &File, digest: Digest) -> io::Result<(InodeKey, FileStamp)> {
    let meta = file.metadata()?;
    let modified = (meta.mtime(), meta.mtime_nsec());
    Ok(((meta.dev(), meta.ino()), FileStamp { digest, bytes: meta.len(), modified }))
}
