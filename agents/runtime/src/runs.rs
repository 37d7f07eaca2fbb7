//! Which runs are paused or over, as the log says: an agent starts nothing for them.

use std::sync::{Arc, RwLock};

use bus::{Bus, Followed, ReadError};
use conduct::{Course, Courses};
use futures::StreamExt;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use wire::{Record, RunId, Subject};

/// What is known of all runs. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Runs {
    courses: Arc<RwLock<Courses>>,
    changed: Arc<Notify>,
}

impl Runs {
    pub(crate) fn course(&self, run: &RunId) -> Course {
        self.courses.read().map(|courses| courses.of(run)).unwrap_or_default()
    }

    /// The state of the run a fact belongs to, as far as that fact is concerned.
    pub(crate) fn course_of(&self, subject: &Subject) -> Course {
        self.courses.read().map(|courses| courses.of_fact(subject)).unwrap_or_default()
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
        let kinds = ["control.*", "done", "cycle.*.archived"];
        let filters = kinds.map(|kind| format!("flotilla.*.{kind}")).to_vec();
        let mut facts = std::pin::pin!(bus.follow(filters, 0));
        while let Some(followed) = facts.next().await {
            match followed {
                Ok(Followed::Record(record)) => self.note(&record),
                Ok(Followed::CaughtUp) => ready.cancel(),
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
        self.changed.notify_waiters();
    }
}
