//! Word from the kernel that something happened in a directory. Only ever a hint: a look
//! decides, and looks come without hints as well.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode},
};
use tokio::sync::Notify;

pub(crate) struct Hints {
    watcher: Option<RecommendedWatcher>,
    watched: BTreeSet<std::path::PathBuf>,
    told: Arc<Notify>,
}

impl Hints {
    /// Without hints, where the kernel gives none.
    pub(crate) fn new(elsewhere: bool) -> Self {
        let told = Arc::new(Notify::new());
        let tell = told.clone();
        let heard = move |event: notify::Result<Event>| {
            if event.is_ok_and(|event| is_news(event.kind)) {
                tell.notify_one();
            }
        };
        let watcher = if elsewhere { None } else { notify::recommended_watcher(heard).ok() };
        Self { watcher, watched: BTreeSet::new(), told }
    }

    /// Listens to a directory and to each checkpoint's in it, as they come and go.
    pub(crate) fn listen(&mut self, directory: &Path, checkpoints: &[(u32, std::path::PathBuf)]) {
        let Some(watcher) = &mut self.watcher else { return };
        let wanted: BTreeSet<_> = checkpoints
            .iter()
            .map(|(_, path)| path.clone())
            .chain([directory.to_owned()])
            .collect();
        // One that is gone is no longer listened to by itself.
        self.watched.retain(|path| wanted.contains(path));
        for path in wanted {
            if !self.watched.contains(&path)
                && watcher.watch(&path, RecursiveMode::NonRecursive).is_ok()
            {
                self.watched.insert(path);
                // Something may have happened before anybody listened.
                self.told.notify_one();
            }
        }
    }

    /// Resolves when something happened since the last time. Cancel-safe.
    pub(crate) async fn heard(&self) {
        self.told.notified().await;
    }
}

/// Whether more than a look, perhaps our own, was taken.
fn is_news(kind: EventKind) -> bool {
    match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
        EventKind::Access(_) => false,
        _ => true,
    }
}
