//! The process groups of an agent's children, so that all can be paused or ended at once.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::process::{Pid, Signal, kill_process_group};

/// Those that live. Cheap to clone; a clone is the same herd.
#[derive(Debug, Clone, Default)]
pub struct Herd {
    groups: Arc<Mutex<BTreeMap<u64, Pid>>>,
    next: Arc<AtomicU64>,
}

/// One of them, until this is dropped.
#[derive(Debug)]
pub(crate) struct Member {
    herd: Herd,
    key: u64,
}

impl Herd {
    pub(crate) fn join(&self, group: Pid) -> Member {
        let key = self.next.fetch_add(1, Ordering::Relaxed);
        if let Ok(mut groups) = self.groups.lock() {
            groups.insert(key, group);
        }
        Member { herd: self.clone(), key }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.groups.lock().is_ok_and(|groups| groups.is_empty())
    }

    pub(crate) fn pause(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Under the lock: a group that leaves does so before its number can be another's.
    fn signal(&self, signal: Signal) {
        let Ok(groups) = self.groups.lock() else { return };
        for group in groups.values() {
            // It may be gone already.
            let _ = kill_process_group(*group, signal);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Ok(mut groups) = self.herd.groups.lock() {
            groups.remove(&self.key);
        }
    }
}
