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

/// The parts that are here, and the parts being fetched from the store.
pub(super) type Availability = (PartBitmap, PartBitmap);

#[derive(Default)]
pub(super) struct ActiveDownloads {
    files: Arc<Mutex<BTreeMap<Digest, Arc<PartialFile>>>>,
    begun_count: watch::Sender<u64>,
}

pub(super) struct PartialFile {
    /// The file with its full size.
    pub(super) file: File,
    pub(super) parts: Arc<PartHashes>,
    pub(super) availability: watch::Sender<Availability>,
}

/// Lists a file as being fetched until it is committed to the cache or its download fails.
pub(crate) struct ActiveDownloadGuard {
    digest: Digest,
    files: Arc<Mutex<BTreeMap<Digest, Arc<PartialFile>>>>,
    pub(super) partial_file: Arc<PartialFile>,
}

impl ActiveDownloads {
    pub(super) fn add_file(
        &self,
        digest: Digest,
        parts: Arc<PartHashes>,
        file: &File,
    ) -> io::Result<ActiveDownloadGuard> {
        let none = vec![false; parts.part_count()];
        let availability = watch::Sender::new((none.clone(), none));
        let under_way = Arc::new(PartialFile { file: file.try_clone()?, parts, availability });
        lock_mutex(&self.files).insert(digest, under_way.clone());
        self.begun_count.send_modify(|count| *count += 1);
        Ok(ActiveDownloadGuard { digest, files: self.files.clone(), partial_file: under_way })
    }

    pub(super) fn get(&self, digest: Digest) -> Option<Arc<PartialFile>> {
        lock_mutex(&self.files).get(&digest).cloned()
    }

    pub(super) fn subscribe_begun(&self) -> watch::Receiver<u64> {
        self.begun_count.subscribe()
    }
}

impl PartialFile {
    pub(super) fn covers_range(&self, range: &Range<u64>) -> bool {
        let availability = self.availability.borrow();
        let mut parts = (0..self.parts.part_count()).filter(|index| {
            let part = self.parts.part_range(*index);
            part.start < range.end && range.start < part.end
        });
        range.end <= self.parts.file_bytes() && parts.all(|index| availability.0[index])
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
