//! Files that are being fetched. Peers may request the parts that have arrived.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    ops::Range,
    sync::{Arc, Mutex},
};

use tokio::sync::watch;
use wire::Digest;

use super::{lock_mutex, plan::PartBitmap};
use crate::parts::PartHashes;

/// An announcement: the parts that are here, and the parts being fetched from the store.
pub(super) type Availability = (PartBitmap, PartBitmap);

/// The files that are being fetched, by digest.
#[derive(Default)]
pub(super) struct ActiveDownloads {
    /// The files by digest.
    files: Arc<Mutex<BTreeMap<Digest, Arc<PartialFile>>>>,
    /// Number of downloads begun so far.
    begun_count: watch::Sender<u64>,
}

/// A file of which some parts have arrived.
pub(super) struct PartialFile {
    /// The file with its full size.
    pub(super) file: File,
    /// The part hashes of the file.
    pub(super) parts: Arc<PartHashes>,
    /// The current announcement.
    pub(super) availability: watch::Sender<Availability>,
}

/// A guard that lists a file as being fetched, until the file is committed to the cache or its
/// download fails.
pub(crate) struct ActiveDownloadGuard {
    /// The digest of the file.
    digest: Digest,
    /// The list that contains the file.
    files: Arc<Mutex<BTreeMap<Digest, Arc<PartialFile>>>>,
    /// The file.
    pub(super) partial_file: Arc<PartialFile>,
}

impl ActiveDownloads {
    /// Adds a file without any parts, and returns its guard.
    pub(super) fn add_file(
        &self,
        digest: Digest,
        parts: Arc<PartHashes>,
        file: &File,
    ) -> io::Result<ActiveDownloadGuard> {
        let none = vec![false; parts.part_count()];
        let said = watch::Sender::new((none.clone(), none));
        let under_way =
            Arc::new(PartialFile { file: file.try_clone()?, parts, availability: said });
        lock_mutex(&self.files).insert(digest, under_way.clone());
        self.begun_count.send_modify(|count| *count += 1);
        Ok(ActiveDownloadGuard { digest, files: self.files.clone(), partial_file: under_way })
    }

    /// Returns a file that is being fetched.
    pub(super) fn get(&self, digest: Digest) -> Option<Arc<PartialFile>> {
        lock_mutex(&self.files).get(&digest).cloned()
    }

    /// Subscribes to the number of downloads begun.
    pub(super) fn subscribe_begun(&self) -> watch::Receiver<u64> {
        self.begun_count.subscribe()
    }
}

impl PartialFile {
    /// Returns true if all parts of a byte range have arrived.
    pub(super) fn covers_range(&self, range: &Range<u64>) -> bool {
        let said = self.availability.borrow();
        let mut parts = (0..self.parts.part_count()).filter(|index| {
            let part = self.parts.part_range(*index);
            part.start < range.end && range.start < part.end
        });
        range.end <= self.parts.file_bytes() && parts.all(|index| said.0[index])
    }
}

impl Drop for ActiveDownloadGuard {
    fn drop(&mut self) {
        let mut files = lock_mutex(&self.files);
        // Another download of the same file may have replaced this entry.
        if files.get(&self.digest).is_some_and(|there| Arc::ptr_eq(there, &self.partial_file)) {
            files.remove(&self.digest);
        }
    }
}
