//! The response to a storm: a report, or, if the user configured it, pausing or ending the workers.

use std::str::FromStr;

use super::StormLevel;

/// After a longer silence a worker would count as hung.
const PAUSE_MAX_MS: u64 = 30_000;

/// The time without shootdowns after which a pause ends early.
const QUIET_BEFORE_RESUME_MS: u64 = 5_000;

/// The configured response to a storm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StormResponse {
    #[default]
    Report,
    /// Pauses the workers until the storm is over, at most half a minute, then lets them run for
    /// the same time.
    Pause,
    /// Ends the workers; their jobs are returned as a fault of this host.
    Kill,
}

/// The error of an unknown name of a response.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not one of tell, pause, kill (A101)")]
pub struct UnknownResponseError(String);

impl FromStr for StormResponse {
    type Err = UnknownResponseError;

    fn from_str(text: &str) -> Result<Self, UnknownResponseError> {
        match text {
            "tell" => Ok(Self::Report),
            "pause" => Ok(Self::Pause),
            "kill" => Ok(Self::Kill),
            other => Err(UnknownResponseError(other.to_owned())),
        }
    }
}

/// An action on the workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StormAction {
    Pause,
    Resume,
    Kill,
}

/// The state machine of the response.
///
/// - `Running` → `Paused` or `Killed` in a storm, according to the setting;
/// - `Paused` → `Spared` when it has been quiet for 5 s, or at the longest pause;
/// - `Spared` → `Running` after the same time as a pause;
/// - `Killed` → `Running` when the storm is over.
#[derive(Debug, Clone, Default)]
pub struct StormResponder {
    response: StormResponse,
    pause_ms: u64,
    state: ResponderState,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum ResponderState {
    #[default]
    Running,
    Paused {
        since: u64,
        quiet_since: Option<u64>,
    },
    /// The workers run even in a storm, without a pause before `until`.
    Spared {
        until: u64,
    },
    /// The workers were ended; no further action until the storm is over.
    Killed,
}

impl StormResponder {
    /// Creates a responder whose pauses last at most `pause_max_ms`.
    pub fn new(response: StormResponse, pause_max_ms: u64) -> Self {
        Self { response, pause_ms: pause_max_ms.min(PAUSE_MAX_MS), state: ResponderState::Running }
    }

    /// Returns the action for a sample. `is_quiet` is true if the last sample shows no shootdowns.
    pub fn next_action(
        &mut self,
        now_ms: u64,
        level: StormLevel,
        is_quiet: bool,
    ) -> Option<StormAction> {
        let storms = level == StormLevel::Storm;
        match (self.response, self.state) {
            (StormResponse::Pause, ResponderState::Running)
                if storms && self.pause_ms > 0 && !is_quiet =>
            {
                self.state = ResponderState::Paused { since: now_ms, quiet_since: None };
                Some(StormAction::Pause)
            }
            (StormResponse::Kill, ResponderState::Running) if storms && !is_quiet => {
                self.state = ResponderState::Killed;
                Some(StormAction::Kill)
            }
            (_, ResponderState::Paused { since, quiet_since }) => {
                let quiet_since = is_quiet.then(|| quiet_since.unwrap_or(now_ms));
                let over = quiet_since
                    .is_some_and(|at| now_ms.saturating_sub(at) >= QUIET_BEFORE_RESUME_MS);
                if over || now_ms.saturating_sub(since) >= self.pause_ms {
                    let until = now_ms.saturating_add(self.pause_ms);
                    self.state = ResponderState::Spared { until };
                    return Some(StormAction::Resume);
                }
                self.state = ResponderState::Paused { since, quiet_since };
                None
            }
            (_, ResponderState::Spared { until }) if now_ms >= until => {
                self.state = ResponderState::Running;
                None
            }
            (_, ResponderState::Killed) if !storms => {
                self.state = ResponderState::Running;
                None
            }
            _ => None,
        }
    }
}
