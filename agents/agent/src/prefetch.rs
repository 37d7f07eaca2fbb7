//! Checkpoint prefetch: while jobs run, fetches the newest checkpoint of the run that the agent
//! works for. No job waits for it, and an error is only logged: the job that needs the checkpoint
//! reports it.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use wire::WorkKind;

use crate::{AgentRole, PrefetchedCheckpoint, agent_context::AgentContext};

/// Does nothing for an agent that only verifies and scores, which need no checkpoints.
pub(crate) async fn run_prefetch(
    shared: AgentContext,
    roles: Vec<Arc<dyn AgentRole>>,
    over: CancellationToken,
) {
    let needs_none = |kind| matches!(kind, WorkKind::Verify | WorkKind::Score);
    if roles.iter().any(|role| !needs_none(role.work_kind())) {
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
