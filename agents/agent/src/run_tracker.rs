//! The states of all runs (paused, over, newest checkpoint), followed from the log.

use std::sync::{Arc, RwLock};

use agent_core::{QuarantineState, RunStatus, RunStatuses};
use bus::{Bus, LogEvent, ReadError};
use futures::StreamExt;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use wire::{AgentId, FactBody, Record, RunId, Subject, v1};

/// The states of all runs, and whether a run has quarantined this agent. Cheap to clone; clones
/// share one state.
#[derive(Debug, Clone)]
pub(crate) struct RunTracker {
    agent: AgentId,
    statuses: Arc<RwLock<RunStatuses>>,
    quarantine: Arc<RwLock<QuarantineState>>,
    changed: Arc<Notify>,
    newest_checkpoint: watch::Sender<Option<NewestCheckpoint>>,
    /// The run whose job began last.
    active_run: Arc<RwLock<Option<RunId>>>,
}

/// The last checkpoint that ended a training, with its run.
pub(crate) type NewestCheckpoint = (RunId, v1::Checkpoint);

impl RunTracker {
    /// Creates a tracker that `follow_log` fills.
    pub(crate) fn new(agent: &AgentId) -> Self {
        Self {
            agent: agent.clone(),
            statuses: Arc::default(),
            quarantine: Arc::new(RwLock::new(QuarantineState::new(agent.as_str()))),
            changed: Arc::default(),
            newest_checkpoint: watch::Sender::new(None),
            active_run: Arc::default(),
        }
    }

    pub(crate) fn quarantine_reason(&self) -> Option<String> {
        self.quarantine
            .read()
            .ok()
            .and_then(|quarantine| quarantine.quarantine_reason().map(str::to_owned))
    }

    pub(crate) async fn wait_for_quarantine(&self) {
        loop {
            let changed = self.changed.notified();
            if self.quarantine_reason().is_some() {
                return;
            }
            changed.await;
        }
    }

    pub(crate) fn run_status(&self, run: &RunId) -> RunStatus {
        self.statuses.read().map(|courses| courses.run_status(run)).unwrap_or_default()
    }

    pub(crate) fn status_for_fact(&self, subject: &Subject) -> RunStatus {
        self.statuses.read().map(|courses| courses.status_for_fact(subject)).unwrap_or_default()
    }

    pub(crate) fn watch_newest(&self) -> watch::Receiver<Option<NewestCheckpoint>> {
        self.newest_checkpoint.subscribe()
    }

    pub(crate) fn set_active_run(&self, run: &RunId) {
        if let Ok(mut last) = self.active_run.write() {
            *last = Some(run.clone());
        }
    }

    pub(crate) fn is_active_run(&self, run: &RunId) -> bool {
        self.active_run.read().is_ok_and(|last| last.as_ref() == Some(run))
    }

    pub(crate) async fn wait_until_over(&self, run: &RunId) {
        self.wait_for_status(run, |course| course.is_over).await;
    }

    /// Waits until a run is not paused, or is over.
    pub(crate) async fn wait_until_resumed(&self, run: &RunId) {
        self.wait_for_status(run, |course| course.is_over || !course.paused).await;
    }

    async fn wait_for_status(&self, run: &RunId, holds: impl Fn(RunStatus) -> bool) {
        loop {
            let changed = self.changed.notified();
            if holds(self.run_status(run)) {
                return;
            }
            changed.await;
        }
    }

    /// Follows the log, and cancels `ready` once it has caught up. Returns only when the log has
    /// been replaced, because the known states are then wrong.
    pub(crate) async fn follow_log(&self, bus: &Bus, ready: CancellationToken) -> ReadError {
        let found = format!("quarantine.{}.*", self.agent);
        let kinds = ["control.*", "done", "cycle.*.archived", "checkpoint.*.*", &found];
        let filters = kinds.map(|kind| format!("flotilla.*.{kind}")).to_vec();
        let mut facts = std::pin::pin!(bus.follow_facts(filters, 0));
        while let Some(followed) = facts.next().await {
            match followed {
                Ok(LogEvent::Record(record)) => self.apply_record(&record),
                Ok(LogEvent::CaughtUp) => {
                    if let Ok(mut quarantine) = self.quarantine.write() {
                        quarantine.mark_caught_up();
                    }
                    ready.cancel();
                }
                Ok(LogEvent::Unreadable { subject, error, .. }) => {
                    tracing::warn!(subject, %error, "log entry is not a fact; skipped");
                }
                Err(error @ ReadError::Truncated { .. }) => return error,
                Err(error) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::warn!(error, "following the log failed; retrying");
                }
            }
        }
        unreachable!("following never ends")
    }

    fn apply_record(&self, record: &Record) {
        if let Ok(mut courses) = self.statuses.write() {
            courses.apply_fact(record);
        }
        if let Ok(mut quarantine) = self.quarantine.write() {
            quarantine.apply_fact(record);
        }
        if let FactBody::Checkpoint(checkpoint) = &record.fact.body
            && checkpoint.r#final
        {
            let run = record.fact.subject.run.clone();
            self.newest_checkpoint.send_replace(Some((run, checkpoint.clone())));
        }
        self.changed.notify_waiters();
    }
}
