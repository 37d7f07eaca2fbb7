//! Which runs are paused or over, as the log says: an agent starts nothing for them.

use std::sync::{Arc, RwLock};

use bus::{Bus, Followed, ReadError};
use conduct::{Course, Courses, Standing};
use futures::StreamExt;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use wire::{AgentId, Body, Record, RunId, Subject, v1};

/// What is known of all runs, and what they found of this agent. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Runs {
    agent: AgentId,
    courses: Arc<RwLock<Courses>>,
    standing: Arc<RwLock<Standing>>,
    changed: Arc<Notify>,
    newest: watch::Sender<Option<Newest>>,
    /// The run whose job began last.
    worked_for: Arc<RwLock<Option<RunId>>>,
}

/// The last checkpoint that ended a training, and its run.
pub(crate) type Newest = (RunId, v1::Checkpoint);

impl Runs {
    pub(crate) fn new(agent: &AgentId) -> Self {
        Self {
            agent: agent.clone(),
            courses: Arc::default(),
            standing: Arc::new(RwLock::new(Standing::new(agent.as_str()))),
            changed: Arc::default(),
            newest: watch::Sender::new(None),
            worked_for: Arc::default(),
        }
    }

    /// Why this agent must generate nothing more, if so.
    pub(crate) fn convicted(&self) -> Option<String> {
        self.standing.read().ok().and_then(|standing| standing.why().map(str::to_owned))
    }

    /// Resolves when it must not.
    pub(crate) async fn until_convicted(&self) {
        loop {
            let changed = self.changed.notified();
            if self.convicted().is_some() {
                return;
            }
            changed.await;
        }
    }

    pub(crate) fn course(&self, run: &RunId) -> Course {
        self.courses.read().map(|courses| courses.of(run)).unwrap_or_default()
    }

    /// The state of the run a fact belongs to, as far as that fact is concerned.
    pub(crate) fn course_of(&self, subject: &Subject) -> Course {
        self.courses.read().map(|courses| courses.of_fact(subject)).unwrap_or_default()
    }

    /// What was trained last, by whomever.
    pub(crate) fn newest(&self) -> watch::Receiver<Option<Newest>> {
        self.newest.subscribe()
    }

    /// A job of the run begins.
    pub(crate) fn work_for(&self, run: &RunId) {
        if let Ok(mut last) = self.worked_for.write() {
            *last = Some(run.clone());
        }
    }

    /// Whether the job that began last is the run's.
    pub(crate) fn is_worked_for(&self, run: &RunId) -> bool {
        self.worked_for.read().is_ok_and(|last| last.as_ref() == Some(run))
    }

    /// Resolves when a run is over.
    pub(crate) async fn over(&self, run: &RunId) {
        self.until(run, |course| course.over).await;
    }

    /// Resolves when a run goes on, or is over.
    pub(crate) async fn goes_on(&self, run: &RunId) {
        self.until(run, |course| course.over || !course.paused).await;
    }

    async fn until(&self, run: &RunId, holds: impl Fn(Course) -> bool) {
        loop {
            let changed = self.changed.notified();
            if holds(self.course(run)) {
                return;
            }
            changed.await;
        }
    }

    /// Follows the log; `ready` is cancelled once it has caught up. Returns when the log is no
    /// longer the one it was: what is known of its runs is then wrong.
    pub(crate) async fn follow(&self, bus: &Bus, ready: CancellationToken) -> ReadError {
        let found = format!("quarantine.{}.*", self.agent);
        let kinds = ["control.*", "done", "cycle.*.archived", "checkpoint.*.*", &found];
        let filters = kinds.map(|kind| format!("flotilla.*.{kind}")).to_vec();
        let mut facts = std::pin::pin!(bus.follow(filters, 0));
        while let Some(followed) = facts.next().await {
            match followed {
                Ok(Followed::Record(record)) => self.note(&record),
                Ok(Followed::CaughtUp) => {
                    if let Ok(mut standing) = self.standing.write() {
                        standing.begin();
                    }
                    ready.cancel();
                }
                Ok(Followed::Unreadable { subject, error, .. }) => {
                    tracing::warn!(subject, %error, "an entry of the log that is no fact");
                }
                Err(error @ ReadError::WentBack { .. }) => return error,
                Err(error) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::warn!(error, "following the log");
                }
            }
        }
        unreachable!("following never ends")
    }

    fn note(&self, record: &Record) {
        if let Ok(mut courses) = self.courses.write() {
            courses.note(record);
        }
        if let Ok(mut standing) = self.standing.write() {
            standing.note(record);
        }
        if let Body::Checkpoint(checkpoint) = &record.fact.body
            && checkpoint.r#final
        {
            let run = record.fact.subject.run.clone();
            self.newest.send_replace(Some((run, checkpoint.clone())));
        }
        self.changed.notify_waiters();
    }
}
