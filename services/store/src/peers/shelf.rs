//! Files that are being fetched, as far as they have come: peers may have what is there already.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    ops::Range,
    sync::{Arc, Mutex},
};

use tokio::sync::watch;
use wire::Digest;

use super::{lock, plan::Marks};
use crate::parts::Parts;

/// What is here, and what is on its way from the store.
pub(super) type Said = (Marks, Marks);

#[derive(Default)]
pub(super) struct Shelf {
    files: Arc<Mutex<BTreeMap<Digest, Arc<UnderWay>>>>,
    /// Counts the files that were ever put here.
    begun: watch::Sender<u64>,
}

pub(super) struct UnderWay {
    pub(super) file: File,
    pub(super) parts: Arc<Parts>,
    pub(super) said: watch::Sender<Said>,
}

/// Keeps a file on the shelf: until it has its name in the cache, or is given up.
pub(crate) struct Entry {
    digest: Digest,
    files: Arc<Mutex<BTreeMap<Digest, Arc<UnderWay>>>>,
    pub(super) under_way: Arc<UnderWay>,
}

impl Shelf {
    pub(super) fn put(&self, digest: Digest, parts: Arc<Parts>, file: &File) -> io::Result<Entry> {
        let none = vec![false; parts.count()];
        let said = watch::Sender::new((none.clone(), none));
        let under_way = Arc::new(UnderWay { file: file.try_clone()?, parts, said });
        lock(&self.files).insert(digest, under_way.clone());
        self.begun.send_modify(|count| *count += 1);
        Ok(Entry { digest, files: self.files.clone(), under_way })
    }

    pub(super) fn get(&self, digest: Digest) -> Option<Arc<UnderWay>> {
        lock(&self.files).get(&digest).cloned()
    }

    pub(super) fn begun(&self) -> watch::Receiver<u64> {
        self.begun.subscribe()
    }
}

impl UnderWay {
    /// Whether all of it is there, and right.
    pub(super) fn covers(&self, range: &Range<u64>) -> bool {
        let said = self.said.borrow();
        let mut parts = (0..self.parts.count()).filter(|index| {
            let part = self.parts.range(*index);
            part.start < range.end && range.start < part.end
        });
        range.end <= self.parts.bytes() && parts.all(|index| said.0[index])
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut files = lock(&self.files);
        // Another may have begun it anew.
        if files.get(&self.digest).is_some_and(|there| Arc::ptr_eq(there, &self.under_way)) {
            files.remove(&self.digest);
        }
    }
}
