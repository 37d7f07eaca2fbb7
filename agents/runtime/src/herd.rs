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
    /// With the names their commands have.
    groups: Arc<Mutex<BTreeMap<u64, (Pid, String)>>>,
    next: Arc<AtomicU64>,
}

/// One of them, until this is dropped.
#[derive(Debug)]
pub(crate) struct Member {
    herd: Herd,
    key: u64,
}

impl Herd {
    pub(crate) fn join(&self, group: Pid, name: &str) -> Member {
        let key = self.next.fetch_add(1, Ordering::Relaxed);
        if let Ok(mut groups) = self.groups.lock() {
            groups.insert(key, (group, name.to_owned()));
        }
        Member { herd: self.clone(), key }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.groups.lock().is_ok_and(|groups| groups.is_empty())
    }

    pub(crate) fn pause(&self) {
        self.signal(Signal::STOP, |_| true);
    }

    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT, |_| true);
    }

    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL, |_| true);
    }

    /// Ends those of one name.
    pub(crate) fn kill_named(&self, name: &str) {
        self.signal(Signal::KILL, |other| other == name);
    }

    /// Under the lock: a group that leaves does so before its number can be another's.
    fn signal(&self, signal: Signal, whom: impl Fn(&str) -> bool) {
        let Ok(groups) = self.groups.lock() else { return };
        for (group, _) in groups.values().filter(|(_, name)| whom(name)) {
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
