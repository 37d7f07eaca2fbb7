//! Checkpoint prefetch: while jobs run, the agent fetches the newest checkpoint of the run it works
//! for, one checkpoint at a time.
//!
//! No job waits for a prefetch. An error here is only logged, because the job that needs the
//! checkpoint reports it.

use std::sync::Arc;

use store::{CachedTree, FileCache, GetError, Store};
use tokio_util::sync::CancellationToken;
use wire::{WorkKind, v1};

use crate::{AgentRole, role_runner::AgentContext};

/// A checkpoint that the next jobs may need, and the source of its files.
pub struct PrefetchedCheckpoint {
    /// The checkpoint fact, with the trees of its base and its weights.
    pub checkpoint: v1::Checkpoint,
    store: Store,
    cache: FileCache,
}

impl PrefetchedCheckpoint {
    /// Returns a tree in the cache, fetched if it is missing.
    ///
    /// # Errors
    /// When it cannot be fetched.
    pub async fn fetch_tree(&self, tree: &v1::Tree) -> Result<CachedTree, GetError> {
        self.cache.fetch_tree(&self.store, tree).await
    }
}

/// Prefetches checkpoints until the agent drains or `over` is cancelled. Does nothing for an agent
/// that only verifies.
pub(crate) async fn run_prefetch(
    shared: AgentContext,
    roles: Vec<Arc<dyn AgentRole>>,
    over: CancellationToken,
) {
    if roles.iter().any(|role| role.work_kind() != WorkKind::Verify) {
        let looking = shared.drain.run_until_cancelled(prefetch_newest(&shared, &roles));
        over.run_until_cancelled(looking).await;
    }
}

/// Fetches each new final checkpoint of the active run, then lets each role prepare it.
async fn prefetch_newest(shared: &AgentContext, roles: &[Arc<dyn AgentRole>]) {
    let AgentContext { runs, store, cache, .. } = shared;
    let mut newest = runs.watch_newest();
    // Keeps the tree in use, so that it is not evicted before the jobs need it.
    let mut _kept = None;
    while newest.changed().await.is_ok() {
        let next = newest.borrow_and_update().clone();
        let Some((run, checkpoint)) = next.filter(|(run, _)| runs.is_active_run(run)) else {
            continue;
        };
        let Some(tree) = &checkpoint.tree else { continue };
        match cache.fetch_tree(store, tree).await {
            Ok(tree) => _kept = Some(tree),
            Err(error) => {
                let error = format!("{:#}", anyhow::Error::from(error));
                tracing::debug!(%run, error, "checkpoint prefetch failed");
                continue;
            }
        }
        let ahead = PrefetchedCheckpoint { checkpoint, store: store.clone(), cache: cache.clone() };
        for role in roles {
            role.prefetch_checkpoint(&ahead).await;
        }
    }
}
