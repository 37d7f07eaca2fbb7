//! The state and connections that an agent's tasks share.

use std::sync::Arc;

use bus::Bus;
use store::{FileCache, Store};
use tokio_util::sync::CancellationToken;
use wire::WorkKind;

use crate::{
    AgentConfig, AgentRole, live_status::LiveStatus, run_tracker::RunTracker,
    telemetry::TelemetryHandle,
};

/// The state and connections that all roles of an agent share. Cheap to clone.
#[derive(Clone)]
pub(crate) struct AgentContext {
    pub(crate) config: AgentConfig,
    pub(crate) bus: Bus,
    pub(crate) store: Store,
    pub(crate) cache: FileCache,
    pub(crate) live_status: LiveStatus,
    pub(crate) runs: RunTracker,
    pub(crate) telemetry: TelemetryHandle,
    /// Cancelled when held jobs must end now.
    pub(crate) stop_jobs: CancellationToken,
    /// Cancelled when no new job is taken.
    pub(crate) drain: CancellationToken,
}

impl AgentContext {
    /// Updates the memory for training in the agent's status, at each host check until `over` is
    /// cancelled. Does nothing without a trainer role.
    pub(crate) fn watch_training_memory(
        self,
        roles: &[Arc<dyn AgentRole>],
        over: CancellationToken,
    ) -> impl Future<Output = ()> + use<> {
        let trainer = roles.iter().find(|role| role.work_kind() == WorkKind::Train);
        let on_gpu = trainer.map(|role| role.uses_gpu());
        async move {
            while let Some(on_gpu) = on_gpu {
                let bytes = self.config.doctor.training_budget_bytes(on_gpu).await;
                self.live_status.update_status(|status| status.training_bytes = bytes.unwrap_or(0));
                let pause = tokio::time::sleep(self.config.intervals.host_check);
                if over.run_until_cancelled(pause).await.is_none() {
                    break;
                }
            }
        }
    }
}
