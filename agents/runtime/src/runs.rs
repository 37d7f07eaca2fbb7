//! Which runs are paused or over, as the log says: an agent starts nothing for them.

use std::{
    collections::BTreeMap,
    sync::{Arc, RwLock},
};

use bus::{Bus, Followed, ReadError};
use futures::StreamExt;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use wire::{Body, Record, RunId, v1};

/// Whether an agent may work on a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    Open,
    /// Since the fact at this position of the log; orders behind it are newer than the pause.
    Paused {
        at: u64,
    },
    Over,
}

/// What is known of all runs. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Runs {
    states: Arc<RwLock<BTreeMap<RunId, RunState>>>,
    changed: Arc<Notify>,
}

impl Runs {
    pub fn state(&self, run: &RunId) -> RunState {
        let states = self.states.read().ok();
        states.and_then(|states| states.get(run).copied()).unwrap_or(RunState::Open)
    }

    /// Resolves when a run is over.
    pub async fn over(&self, run: &RunId) {
        loop {
            let changed = self.changed.notified();
            if self.state(run) == RunState::Over {
                return;
            }
            changed.await;
        }
    }

    /// Follows the log; `ready` is cancelled once it has caught up. Returns when the log is no
    /// longer the one it was: what is known of its runs is then wrong.
    pub(crate) async fn follow(&self, bus: &Bus, ready: CancellationToken) -> ReadError {
        let filters = ["flotilla.*.control.*", "flotilla.*.done"].map(str::to_owned).to_vec();
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
        use v1::control::Action;
        let state = match &record.fact.body {
            Body::Done(_) => RunState::Over,
            Body::Control(control) => match control.action() {
                Action::Pause => RunState::Paused { at: record.sequence },
                Action::Cancel => RunState::Over,
                Action::Resume | Action::Unspecified => RunState::Open,
            },
            _ => return,
        };
        if let Ok(mut states) = self.states.write() {
            let known = states.entry(record.fact.subject.run.clone()).or_insert(state);
            if *known != RunState::Over {
                *known = state;
            }
        }
        self.changed.notify_waiters();
    }
}
