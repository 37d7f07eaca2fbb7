//! The interface between the agent's loop and a role.

use std::time::Duration;

use agent_core::SamplingThroughput;
use futures::{FutureExt, future::BoxFuture};
use wire::{WorkKind, v1::agent_status::TrainingSpeed};

use crate::{JobError, LeasedJob, MemoryNeeds, PrefetchedCheckpoint};

/// The time that held jobs have to end when the process must stop.
const DEFAULT_GRACE: Duration = Duration::from_secs(2);

/// One role of an agent: generator, verifier, scorer, trainer or evaluator.
///
/// For each role the agent repeats: `wait_for_room`, pull a job of `work_kind`, wait until the host
/// has the memory of `memory_needs`, then `run` under a renewed lease. Several jobs run at once
/// while `wait_for_room` permits. On drain the agent calls `begin_drain`; when the process must
/// stop, held jobs have the role's grace period.
pub trait AgentRole: Send + Sync + 'static {
    fn work_kind(&self) -> WorkKind;

    /// Waits until the role can take one more job. Cancel-safe.
    fn wait_for_room(&self) -> BoxFuture<'_, ()>;

    /// Does a job and writes its results. Must be idempotent: an earlier attempt may have stopped
    /// at any point.
    fn run<'a>(&'a self, job: &'a LeasedJob) -> BoxFuture<'a, Result<(), JobError>>;

    /// Describes the engine that runs models, with its limitations, for users; empty if the role
    /// runs none.
    fn describe_engine(&self) -> String {
        String::new()
    }

    /// Lists what the role can do on this host but not on every host.
    fn list_abilities(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns true if the role uses the GPU, so that failed GPU checks withhold it.
    fn uses_gpu(&self) -> bool {
        false
    }

    /// Returns the memory that a job needs and the memory that is free; `None` if memory does not
    /// matter or is unknown.
    fn memory_needs<'a>(
        &'a self,
        _job: &'a LeasedJob,
    ) -> BoxFuture<'a, Result<Option<MemoryNeeds>, JobError>> {
        async { Ok(None) }.boxed()
    }

    /// Prepares a checkpoint that the next jobs may need, but only while no job waits for the
    /// role's worker.
    fn prefetch_checkpoint<'a>(&'a self, _ahead: &'a PrefetchedCheckpoint) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }

    /// Notifies the role that the agent takes no new jobs, because it is drained or stopped. Long
    /// work may then be brought to a point where it can be handed over.
    fn begin_drain(&self) {}

    /// Returns the time that a held job has to be handed over or ended once the process must stop.
    fn grace(&self) -> Duration {
        DEFAULT_GRACE
    }

    /// Returns the speed at which the role generates samples; `None` for other roles.
    fn current_throughput(&self) -> Option<SamplingThroughput> {
        None
    }

    /// Returns the speed of the role's last training; `None` for other roles, and before the first.
    fn training_speed(&self) -> Option<TrainingSpeed> {
        None
    }
}
