//! Counters of transferred bytes by origin.

use std::sync::atomic::{AtomicU64, Ordering};

/// Transferred bytes of files since the agent started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TransferTotals {
    /// Bytes received from the store.
    pub from_store: u64,
    /// Bytes received from peers.
    pub from_peers: u64,
    /// Bytes sent to peers.
    pub to_peers: u64,
}

/// The counters behind [`TransferTotals`].
#[derive(Default)]
pub(super) struct TransferCounters {
    from_store: AtomicU64,
    from_peers: AtomicU64,
    to_peers: AtomicU64,
}

impl TransferCounters {
    /// Adds bytes received from the store.
    pub(super) fn add_from_store(&self, bytes: u64) {
        self.from_store.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds bytes received from peers.
    pub(super) fn add_from_peers(&self, bytes: u64) {
        self.from_peers.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds bytes sent to peers.
    pub(super) fn add_to_peers(&self, bytes: u64) {
        self.to_peers.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the current values.
    pub(super) fn current_totals(&self) -> TransferTotals {
        let now = |count: &AtomicU64| count.load(Ordering::Relaxed);
        TransferTotals {
            from_store: now(&self.from_store),
            from_peers: now(&self.from_peers),
            to_peers: now(&self.to_peers),
        }
    }
}
