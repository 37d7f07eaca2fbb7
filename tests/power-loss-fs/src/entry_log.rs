//! Changes of names that are not durable yet.

use std::{collections::BTreeSet, ffi::OsString};

use crate::file_tree::Inode;

/// The new target of a name in a directory; `None` if the name was removed.
#[derive(Debug, Clone)]
pub(crate) struct EntryChange {
    pub(crate) directory: Inode,
    pub(crate) name: OsString,
    pub(crate) target: Option<Inode>,
}

/// The changes of one system call, which become durable together: a rename has two.
pub(crate) type EntryOperation = Vec<EntryChange>;

#[derive(Debug, Default)]
pub(crate) struct EntryLog(Vec<EntryOperation>);

impl EntryLog {
    pub(crate) fn push(&mut self, operation: EntryOperation) {
        self.0.push(operation);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Removes and returns the first operations, in order.
    pub(crate) fn take_first(&mut self, count: usize) -> Vec<EntryOperation> {
        self.0.drain(..count).collect()
    }

    /// Removes and returns the selected operations, in order, and the earlier ones that they depend
    /// on because they change the same names.
    pub(crate) fn take_selected(
        &mut self,
        mut is_selected: impl FnMut(&EntryOperation) -> bool,
    ) -> Vec<EntryOperation> {
        let mut names = BTreeSet::new();
        let (mut taken, mut left) = (Vec::new(), Vec::new());
        for operation in self.0.drain(..).rev() {
            let key = |change: &EntryChange| (change.directory, change.name.clone());
            let is_needed = operation.iter().any(|change| names.contains(&key(change)));
            if is_needed || is_selected(&operation) {
                names.extend(operation.iter().map(key));
                taken.push(operation);
            } else {
                left.push(operation);
            }
        }
        taken.reverse();
        left.reverse();
        self.0 = left;
        taken
    }
}
