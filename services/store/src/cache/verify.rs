//! Which files this process has hashed, and how they looked then.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use wire::Digest;

use crate::files;

/// Forgetting only costs hashing a file once more.
const MAX_NOTED: usize = 100_000;

#[derive(Default)]
pub(crate) struct Verified {
    noted: Mutex<BTreeMap<Inode, Stamp>>,
}

/// Device and inode number.
type Inode = (u64, u64);

#[derive(Clone, Copy, PartialEq)]
struct Stamp {
    digest: Digest,
    bytes: u64,
    /// Seconds and nanoseconds. Links and access times, which we change ourselves, leave it.
    modified: (i64, i64),
}

impl Verified {
    /// Records a file whose bytes were just compared with their digest.
    pub(crate) fn note(&self, file: &File, digest: Digest) -> io::Result<()> {
        let (inode, stamp) = look(file, digest)?;
        let mut noted = self.noted();
        if noted.len() >= MAX_NOTED {
            noted.clear();
        }
        noted.insert(inode, stamp);
        Ok(())
    }

    /// Hashes the file unless this process did and nothing touched it since.
    pub(crate) fn is_intact(&self, file: &File, digest: Digest, bytes: u64) -> io::Result<bool> {
        let (inode, stamp) = look(file, digest)?;
        if stamp.bytes != bytes {
            return Ok(false);
        }
        let known = self.noted().get(&inode).copied();
        if known == Some(stamp) {
            return Ok(true);
        }
        let (found, count, _) = files::hash(file, &|_| ())?;
        let intact = (found, count) == (digest, bytes);
        if intact {
            self.note(file, digest)?;
        }
        Ok(intact)
    }

    fn noted(&self) -> MutexGuard<'_, BTreeMap<Inode, Stamp>> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn look(file: &File, digest: Digest) -> io::Result<(Inode, Stamp)> {
    let meta = file.metadata()?;
    let modified = (meta.mtime(), meta.mtime_nsec());
    Ok(((meta.dev(), meta.ino()), Stamp { digest, bytes: meta.len(), modified }))
}
