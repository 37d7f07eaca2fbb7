//! One job under its lease: from the delivery to its acknowledgement.

use std::time::Duration;

use bus::{AckError, Bus, Delivery};
use futures::FutureExt;
use store::{Cache, Store};
use tokio_util::sync::CancellationToken;
use wire::{Fact, Place, Record, Subject, WorkKind, v1};

use crate::{
    Job, JobError, Role, RunState, Runs, agent::Config, failure, lease, presence::Presence,
};

/// Before a failed job is tried again, times the failures so far.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// An agent that failed takes nothing for this much longer than its job is held back, so
/// that another gets it.
const REST: Duration = Duration::from_millis(500);

/// What handing a job back may take when the agent leaves; after that its lease runs out.
const HAND_BACK_LIMIT: Duration = Duration::from_secs(2);

/// What the roles of an agent share.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) bus: Bus,
    pub(crate) store: Store,
    pub(crate) cache: Cache,
    pub(crate) presence: Presence,
    pub(crate) runs: Runs,
    /// Set when held jobs must end now.
    pub(crate) leave: CancellationToken,
}

/// What users call the role that does a kind of work.
pub(crate) fn role_name(kind: WorkKind) -> &'static str {
    match kind {
        WorkKind::Generate => "generator",
        WorkKind::Verify => "verifier",
        WorkKind::Train => "trainer",
        WorkKind::Eval => "evaluator",
    }
}

impl Shared {
    /// Sees a delivery through. The answer is how long the role should take nothing new.
    pub(crate) async fn handle(&self, role: &dyn Role, delivery: Delivery) -> Duration {
        let settled = match &delivery.record {
            Ok(record) => self.work(role, record, &delivery).await,
            Err(error) => {
                // The coordinator reads it too, and ends the run.
                tracing::error!(%error, "an entry of the log that calls for work cannot be read");
                delivery.ack().await.map(|()| Duration::ZERO)
            }
        };
        settled.unwrap_or_else(|error| {
            // The lease runs out and somebody, perhaps we, finds the result written.
            tracing::warn!(%error, "settling a job");
            Duration::ZERO
        })
    }

    async fn work(
        &self,
        role: &dyn Role,
        record: &Record,
        delivery: &Delivery,
    ) -> Result<Duration, AckError> {
        let run = record.fact.subject.run.clone();
        let ordered = matches!(role.kind(), WorkKind::Generate | WorkKind::Train);
        match self.runs.state(&run) {
            RunState::Over => return delivery.ack().await.map(|()| Duration::ZERO),
            // The coordinator orders again when the run goes on.
            RunState::Paused { at } if ordered && record.sequence < at => {
                return delivery.ack().await.map(|()| Duration::ZERO);
            }
            RunState::Paused { .. } | RunState::Open => {}
        }
        let job = self.job(role, record);
        tracing::info!(subject = %record.fact.subject, delivered = delivery.delivered, "job begins");
        let outcome = match failure::poison(delivery) {
            Some(poison) => Err(poison),
            None => self.attempt(role, &job, delivery).await,
        };
        self.presence.update(|status| status.jobs_done += u64::from(outcome.is_ok()));
        match outcome {
            Ok(()) => delivery.ack().await.map(|()| Duration::ZERO),
            Err(JobError::Stopped) if self.runs.state(&run) == RunState::Over => {
                delivery.ack().await.map(|()| Duration::ZERO)
            }
            Err(JobError::Stopped) => {
                let _ = tokio::time::timeout(HAND_BACK_LIMIT, delivery.nak(Duration::ZERO)).await;
                Ok(Duration::ZERO)
            }
            Err(error) => fail(role, &job, delivery, &error).await,
        }
    }

    /// Does the job for as long as the run goes on and the agent stays. A panic is a failure.
    async fn attempt(
        &self,
        role: &dyn Role,
        job: &Job,
        delivery: &Delivery,
    ) -> Result<(), JobError> {
        let work = std::panic::AssertUnwindSafe(role.run(job)).catch_unwind();
        tokio::select! {
            biased;
            outcome = work => outcome.unwrap_or_else(|_| {
                Err(JobError::retry(anyhow::anyhow!("the agent panicked; its log says where")))
            }),
            () = self.runs.over(&job.run) => Err(JobError::Stopped),
            () = self.leave.cancelled() => Err(JobError::Stopped),
            never = lease::keep(delivery) => match never {},
        }
    }

    fn job(&self, role: &dyn Role, record: &Record) -> Job {
        let (cycle, name) = describe(&record.fact);
        let active = v1::ActiveJob {
            role: role_name(role.kind()).into(),
            run: record.fact.subject.run.to_string(),
            cycle,
            job: name,
            ..Default::default()
        };
        Job {
            run: record.fact.subject.run.clone(),
            record: record.clone(),
            agent: self.config.id.to_string(),
            bus: self.bus.clone(),
            store: self.store.clone(),
            cache: self.cache.clone(),
            directory: self.config.directory.clone(),
            progress: self.presence.begin(record.sequence, active),
        }
    }
}

/// Writes what went wrong, then hands the job back, or gives it up.
async fn fail(
    role: &dyn Role,
    job: &Job,
    delivery: &Delivery,
    error: &JobError,
) -> Result<Duration, AckError> {
    tracing::warn!(subject = %job.record.fact.subject, %error, "job failed");
    match failure::record(role.kind(), job, error).await {
        Ok(Some(failures)) => {
            let delay = RETRY_DELAY * failures;
            delivery.nak(delay).await.map(|()| delay + REST)
        }
        Ok(None) => delivery.ack().await.map(|()| Duration::ZERO),
        Err(error) => {
            tracing::warn!(%error, "writing a failure");
            Ok(REST)
        }
    }
}

/// A job's cycle and name, for people.
fn describe(fact: &Fact) -> (u32, String) {
    match &fact.subject.place {
        Place::GenerateOrder { cycle, job, .. } | Place::Samples { cycle, job } => {
            (*cycle, job.to_string())
        }
        Place::TrainOrder { cycle, .. } => (*cycle, "train".into()),
        Place::Checkpoint { cycle, step } => (*cycle, format!("step {step}")),
        _ => (0, Subject::to_string(&fact.subject)),
    }
}
