//! What jobs will ask for next is made ready while the last ones run: of the run that the agent
//! works for, the newest checkpoint, and one at a time. Nobody waits for it, and what fails here
//! is said by the job that asks for it.

use std::sync::Arc;

use store::{Cache, CachedTree, GetError, Store};
use tokio_util::sync::CancellationToken;
use wire::{WorkKind, v1};

use crate::{Role, work::Shared};

/// A checkpoint that the next jobs may ask for, and where its files come from.
pub struct Ahead {
    pub checkpoint: v1::Checkpoint,
    store: Store,
    cache: Cache,
}

impl Ahead {
    /// A tree in the cache.
    ///
    /// # Errors
    /// When it cannot be fetched.
    pub async fn tree(&self, tree: &v1::Tree) -> Result<CachedTree, GetError> {
        self.cache.tree(&self.store, tree).await
    }
}

/// Looks ahead until nothing new is taken any more, or the agent is done.
pub(crate) async fn look(shared: Shared, roles: Vec<Arc<dyn Role>>, over: CancellationToken) {
    if roles.iter().any(|role| role.kind() != WorkKind::Verify) {
        let looking = shared.drain.run_until_cancelled(follow(&shared, &roles));
        over.run_until_cancelled(looking).await;
    }
}

async fn follow(shared: &Shared, roles: &[Arc<dyn Role>]) {
    let Shared { runs, store, cache, .. } = shared;
    let mut newest = runs.newest();
    // In use, so that it is not evicted before the jobs come.
    let mut _kept = None;
    while newest.changed().await.is_ok() {
        let next = newest.borrow_and_update().clone();
        let Some((run, checkpoint)) = next.filter(|(run, _)| runs.is_worked_for(run)) else {
            continue;
        };
        let Some(tree) = &checkpoint.tree else { continue };
        match cache.tree(store, tree).await {
            Ok(tree) => _kept = Some(tree),
            Err(error) => {
                let error = format!("{:#}", anyhow::Error::from(error));
                tracing::debug!(%run, error, "fetching a checkpoint ahead");
                continue;
            }
        }
        let ahead = Ahead { checkpoint, store: store.clone(), cache: cache.clone() };
        for role in roles {
            role.foresee(&ahead).await;
        }
    }
}
