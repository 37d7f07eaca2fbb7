//! The status of a run in the queue of its pool.

use wire::v1;

/// Minutes of a day.
const DAY_MINUTES: u32 = 24 * 60;

/// The status of a run in the queue of its pool, derived from its spec and its controls.
///
/// A run whose spec has a `queue` section begins as `Held`. The queue resumes it (`Active`) and may
/// pause it for another run or at the end of its window (`Suspended`). A user's pause keeps it
/// until the user resumes it, and a user's resume takes it out of the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QueueStatus {
    /// The spec asks for no queue, or a user has resumed the run.
    #[default]
    Outside,
    /// The run waits for its first turn. Nothing was ordered yet, so that its first release begins
    /// no new round.
    Held,
    /// It is the turn of the run.
    Active,
    /// The queue has paused the run.
    Suspended,
    /// A user has paused the run.
    PausedByUser,
}

impl QueueStatus {
    /// Returns the status of a run without controls.
    pub fn from_spec(spec: &v1::Spec) -> Self {
        if spec.queue.is_some() { Self::Held } else { Self::Outside }
    }

    /// Returns the status after a control.
    #[must_use]
    pub fn after_control(self, control: &v1::Control) -> Self {
        use v1::control::Action;
        match (self, control.action(), control.queue) {
            (Self::Outside, _, _) | (_, Action::Resume, false) => Self::Outside,
            (_, Action::Resume, true) => Self::Active,
            (_, Action::Pause, false) | (Self::PausedByUser, Action::Pause, true) => {
                Self::PausedByUser
            }
            (_, Action::Pause, true) => Self::Suspended,
            (status, Action::Cancel | Action::Unspecified, _) => status,
        }
    }

    /// Returns true if the run works only when the queue releases it.
    pub fn is_waiting(self) -> bool {
        matches!(self, Self::Held | Self::Suspended)
    }
}

/// Returns words about a run that waits in a queue, as far as its own facts tell. `pause_reason` is
/// that of the queue's last pause, and may be empty.
pub fn describe_queue_wait(spec: &v1::Spec, pause_reason: &str) -> String {
    match queue_window(spec) {
        _ if !pause_reason.is_empty() => format!("waits: {pause_reason}"),
        Some((from, until)) => {
            format!("waits in the queue, from {} until {}", clock_text(from), clock_text(until))
        }
        None => "waits in the queue".to_owned(),
    }
}

/// Returns the daily window of a run in minutes; `None` without one.
pub(crate) fn queue_window(spec: &v1::Spec) -> Option<(u32, u32)> {
    let queue = spec.queue.as_ref()?;
    queue.from_minute.zip(queue.until_minute)
}

/// Returns a minute of the day as `07:30`.
pub fn clock_text(minute: u32) -> String {
    let minute = minute % DAY_MINUTES;
    format!("{:02}:{:02}", minute / 60, minute % 60)
}
