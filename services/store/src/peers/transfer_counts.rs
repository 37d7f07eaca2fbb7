//! Counters of transferred bytes by origin.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of files transferred since the agent started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TransferTotals {
    pub from_store: u64,
    pub from_peers: u64,
    pub to_peers: u64,
}

#[derive(Default)]
pub(super) struct TransferCounters {
    from_store: AtomicU64,
    from_peers: AtomicU64,
    to_peers: AtomicU64,
}

impl TransferCounters {
    pub(super) fn add_from_store(&self, bytes: u64) {
        self.from_store.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn add_from_peers(&self, bytes: u64) {
        self.from_peers.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn add_to_peers(&self, bytes: u64) {
        self.to_peers.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn current_totals(&self) -> TransferTotals {
        let now = |count: &AtomicU64| count.load(Ordering::Relaxed);
        TransferTotals {
            from_store: now(&self.from_store),
            from_peers: now(&self.from_peers),
            to_peers: now(&self.to_peers),
        }
    }
}
