//! The process groups of an agent's children, so that all can be paused or killed at once.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::process::{Pid, Signal, kill_process_group};

/// A registry of the live process groups. Cheap to clone; clones share one registry.
#[derive(Debug, Clone, Default)]
pub struct ProcessGroups {
    /// The groups by registration key, each with the name of its command.
    groups: Arc<Mutex<BTreeMap<u64, (Pid, String)>>>,
    next_key: Arc<AtomicU64>,
}

/// The registration of one process group, removed when this is dropped.
#[derive(Debug)]
pub(crate) struct GroupMember {
    registry: ProcessGroups,
    key: u64,
}

impl ProcessGroups {
    /// Registers a process group under its command's name.
    pub(crate) fn register_group(&self, group: Pid, name: &str) -> GroupMember {
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        if let Ok(mut groups) = self.groups.lock() {
            groups.insert(key, (group, name.to_owned()));
        }
        GroupMember { registry: self.clone(), key }
    }

    /// Returns true if no process group is registered.
    pub(crate) fn is_empty(&self) -> bool {
        self.groups.lock().is_ok_and(|groups| groups.is_empty())
    }

    /// Stops all groups with SIGSTOP.
    pub(crate) fn pause_all(&self) {
        self.signal_matching(Signal::STOP, |_| true);
    }

    /// Continues all groups with SIGCONT.
    pub(crate) fn resume_all(&self) {
        self.signal_matching(Signal::CONT, |_| true);
    }

    /// Kills all groups with SIGKILL.
    pub(crate) fn kill_all(&self) {
        self.signal_matching(Signal::KILL, |_| true);
    }

    /// Kills the groups of one command name.
    pub(crate) fn kill_named(&self, name: &str) {
        self.signal_matching(Signal::KILL, |other| other == name);
    }

    /// Sends a signal to the groups whose name matches. It holds the lock, because a group is
    /// unregistered before its id can belong to another process.
    fn signal_matching(&self, signal: Signal, whom: impl Fn(&str) -> bool) {
        let Ok(groups) = self.groups.lock() else { return };
        for (group, _) in groups.values().filter(|(_, name)| whom(name)) {
            // The group may be gone already.
            let _ = kill_process_group(*group, signal);
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
