use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use process::ChildPid;
use rustix::process::Signal;

/// A registry of the live process groups of an agent's children, so that all can be paused or
/// killed at once. Cheap to clone; clones share one registry.
#[derive(Debug, Clone, Default)]
pub struct ProcessGroups {
    /// By registration key, each with the name of its command.
    groups: Arc<Mutex<BTreeMap<u64, (ChildPid, String)>>>,
    next_key: Arc<AtomicU64>,
}

/// The registration of one process group, removed when this is dropped.
#[derive(Debug)]
pub(crate) struct GroupMember {
    registry: ProcessGroups,
    key: u64,
}

impl ProcessGroups {
    pub(crate) fn register_group(&self, group: ChildPid, name: &str) -> GroupMember {
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        if let Ok(mut groups) = self.groups.lock() {
            groups.insert(key, (group, name.to_owned()));
        }
        GroupMember { registry: self.clone(), key }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.groups.lock().is_ok_and(|groups| groups.is_empty())
    }

    pub(crate) fn pause_all(&self) {
        self.signal_matching(Signal::STOP, |_| true);
    }

    pub(crate) fn resume_all(&self) {
        self.signal_matching(Signal::CONT, |_| true);
    }

    pub(crate) fn kill_all(&self) {
        self.signal_matching(Signal::KILL, |_| true);
    }

    pub(crate) fn kill_named(&self, name: &str) {
        self.signal_matching(Signal::KILL, |other| other == name);
    }

    /// Holds the lock, because a group is unregistered before its id can belong to another process.
    fn signal_matching(&self, signal: Signal, whom: impl Fn(&str) -> bool) {
        let Ok(groups) = self.groups.lock() else { return };
        for (group, _) in groups.values().filter(|(_, name)| whom(name)) {
            group.signal_group(signal);
        }
    }
}

impl Drop for GroupMember {
    fn drop(&mut self) {
        if let Ok(mut groups) = self.registry.groups.lock() {
            groups.remove(&self.key);
        }
    }
}
