//! How much came from where.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of files, since the agent started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Exchanged {
    pub from_store: u64,
    pub from_peers: u64,
    pub to_peers: u64,
}

#[derive(Default)]
pub(super) struct Counts {
    from_store: AtomicU64,
    from_peers: AtomicU64,
    to_peers: AtomicU64,
}

impl Counts {
    pub(super) fn came_from_store(&self, bytes: u64) {
        self.from_store.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn came_from_peers(&self, bytes: u64) {
        self.from_peers.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn went_to_peers(&self, bytes: u64) {
        self.to_peers.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn now(&self) -> Exchanged {
        let now = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Exchanged {
            from_store: now(&self.from_store),
            from_peers: now(&self.from_peers),
            to_peers: now(&self.to_peers),
        }
    }
}
