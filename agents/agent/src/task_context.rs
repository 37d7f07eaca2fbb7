//! What the agent gives to its background task: its signals and a status handle.

use tokio_util::sync::CancellationToken;
use wire::{WorkKind, v1};

use crate::live_status::{JobKey, JobProgress, LiveStatus, StatusTrouble};

/// The signals and the status handle of a background task.
pub struct TaskContext {
    /// Cancelled when the agent is drained or stopped. The task begins nothing new, finishes what it
    /// has begun, and returns.
    pub drain: CancellationToken,
    /// Cancelled when the agent is stopped. The task returns within seconds.
    pub stop: CancellationToken,
    pub status: TaskStatus,
}

/// A handle through which a background task reports its trouble and progress in the agent's status.
pub struct TaskStatus {
    name: &'static str,
    live_status: LiveStatus,
    current_job: std::sync::Mutex<Option<(String, JobProgress)>>,
}

/// The task that publishes the checkpoints of a training that runs outside of the fleet.
pub const WATCHER_TASK: &str = "watcher";

/// Jobs use their fact's sequence, which never reaches this value.
const PROGRESS_KEY: JobKey = (WorkKind::Train, u64::MAX);

impl TaskStatus {
    pub(crate) fn new(name: &'static str, live_status: LiveStatus) -> Self {
        Self { name, live_status, current_job: std::sync::Mutex::default() }
    }

    /// Sets the reason, for users, why the task does not work; `None` clears it. The agent's next
    /// status contains it.
    pub fn report_trouble(&self, message: Option<String>) {
        let trouble = message.map(|message| StatusTrouble { message, quarantine: false });
        self.live_status.set_trouble(self.name, trouble);
    }

    /// Sets the channels that this agent serves. The agent's next status contains them.
    pub fn report_served(&self, served: Vec<v1::ServedChannel>) {
        self.live_status.update_status(|status| status.served = served);
    }

    /// Sets the task's progress for a run: `done` of `total`, with a note for users. A new `run`
    /// replaces the one before. The agent's next status contains it.
    pub fn report_progress(&self, run: &str, done: u32, total: u32, note: &str) {
        let Ok(mut job) = self.current_job.lock() else { return };
        if job.as_ref().is_none_or(|(known, _)| known != run) {
            let entry =
                v1::ActiveJob { role: self.name.into(), run: run.into(), ..Default::default() };
            *job = Some((run.to_owned(), self.live_status.add_job(PROGRESS_KEY, entry)));
        }
        if let Some((_, progress)) = &*job {
            progress.set_progress(done, total, note);
        }
    }
}
