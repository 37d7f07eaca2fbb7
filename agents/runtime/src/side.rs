//! What an agent gives to work beside its roles: when to end, and a place to say how it goes.

use tokio_util::sync::CancellationToken;
use wire::v1;

use crate::presence::{Presence, Progress, Trouble};

/// Work beside the roles, seen from the inside.
pub struct Side {
    /// Set when the agent is drained or stopped.
    pub stop: CancellationToken,
    pub account: Account,
}

/// What the agent's status says of it.
pub struct Account {
    presence: Presence,
    job: std::sync::Mutex<Option<(String, Progress)>>,
}

const NAME: &str = "watcher";

/// Jobs are kept by their delivery's sequence; this is none.
const KEY: u64 = u64::MAX;

impl Account {
    pub(crate) fn new(presence: Presence) -> Self {
        Self { presence, job: std::sync::Mutex::default() }
    }

    /// What keeps it from working, if anything does.
    pub fn trouble(&self, message: Option<String>) {
        let trouble = message.map(|message| Trouble { message, quarantine: false });
        self.presence.trouble(NAME, trouble);
    }

    /// What it does for a run, and how far that is.
    pub fn job(&self, run: &str, done: u32, total: u32, note: &str) {
        let Ok(mut job) = self.job.lock() else { return };
        if job.as_ref().is_none_or(|(known, _)| known != run) {
            let entry = v1::ActiveJob { role: NAME.into(), run: run.into(), ..Default::default() };
            *job = Some((run.to_owned(), self.presence.begin(KEY, entry)));
        }
        if let Some((_, progress)) = &*job {
            progress.set(done, total, note);
        }
    }
}
