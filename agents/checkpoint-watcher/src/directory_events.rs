//! File-system events of the watched directory. They only trigger an earlier scan; scans also run
//! periodically and alone decide.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode},
};
use tokio::sync::Notify;

/// Reports that something changed, but not what.
pub(crate) struct DirectoryEvents {
    watcher: Option<RecommendedWatcher>,
    watched: BTreeSet<std::path::PathBuf>,
    changed: Arc<Notify>,
}

impl DirectoryEvents {
    /// Creates a watcher that never reports anything if `elsewhere` is true (a network file system)
    /// or the kernel provides no events.
    pub(crate) fn new(elsewhere: bool) -> Self {
        let changed = Arc::new(Notify::new());
        let tell = changed.clone();
        let on_event = move |event: notify::Result<Event>| {
            if event.is_ok_and(|event| is_change(event.kind)) {
                tell.notify_one();
            }
        };
        let watcher = if elsewhere { None } else { notify::recommended_watcher(on_event).ok() };
        Self { watcher, watched: BTreeSet::new(), changed }
    }

    /// Watches the directory and each checkpoint directory in it; stops watching removed ones.
    pub(crate) fn watch_directories(
        &mut self,
        directory: &Path,
        checkpoints: &[(u32, std::path::PathBuf)],
    ) {
        let Some(watcher) = &mut self.watcher else { return };
        let wanted: BTreeSet<_> = checkpoints
            .iter()
            .map(|(_, path)| path.clone())
            .chain([directory.to_owned()])
            .collect();
        // The kernel itself stops watching a removed directory.
        self.watched.retain(|path| wanted.contains(path));
        for path in wanted {
            if !self.watched.contains(&path)
                && watcher.watch(&path, RecursiveMode::NonRecursive).is_ok()
            {
                self.watched.insert(path);
                // A change may have happened before the watch began.
                self.changed.notify_one();
            }
        }
    }

    /// Waits for a change since the last call. Cancel-safe.
    pub(crate) async fn wait_changed(&self) {
        self.changed.notified().await;
    }
}

/// Ignores reads, perhaps by our own scan.
fn is_change(kind: EventKind) -> bool {
    match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
        EventKind::Access(_) => false,
        _ => true,
    }
}
