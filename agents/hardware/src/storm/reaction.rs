//! What is done about a storm: told, and if the user says so, the workers are paused or ended.

use std::str::FromStr;

use super::Level;

/// A paused worker says nothing; for longer it would count as hung.
const PAUSE_MAX_MS: u64 = 30_000;

/// Once nothing storms while they are paused, they wait so long in case it goes on.
const QUIET_MS: u64 = 5_000;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnStorm {
    #[default]
    Tell,
    /// Stops the workers until it is over, for half a minute at most, then lets them run as long.
    Pause,
    /// Ends the workers; their jobs are handed back as this box's fault.
    Kill,
}

#[derive(Debug, thiserror::Error)]
#[error("{0:?} is none of tell, pause, kill (A101)")]
pub struct UnknownReaction(String);

impl FromStr for OnStorm {
    type Err = UnknownReaction;

    fn from_str(text: &str) -> Result<Self, UnknownReaction> {
        match text {
            "tell" => Ok(Self::Tell),
            "pause" => Ok(Self::Pause),
            "kill" => Ok(Self::Kill),
            other => Err(UnknownReaction(other.to_owned())),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    Pause,
    Resume,
    Kill,
}

/// Decides, sample by sample.
#[derive(Debug, Clone, Default)]
pub struct Reaction {
    on: OnStorm,
    pause_ms: u64,
    state: State,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    Running,
    Paused {
        since: u64,
        quiet_since: Option<u64>,
    },
    /// Runs again though it may still storm: no pause before then.
    Spared {
        until: u64,
    },
    /// Nothing more to end until it is calm.
    Killed,
}

impl Reaction {
    /// No pause is longer than `pause_max_ms`.
    pub fn new(on: OnStorm, pause_max_ms: u64) -> Self {
        Self { on, pause_ms: pause_max_ms.min(PAUSE_MAX_MS), state: State::Running }
    }

    /// `is_quiet`: just now there is nothing of it.
    pub fn next(&mut self, now_ms: u64, level: Level, is_quiet: bool) -> Option<Act> {
        let storms = level == Level::Storm;
        match (self.on, self.state) {
            (OnStorm::Pause, State::Running) if storms && self.pause_ms > 0 && !is_quiet => {
                self.state = State::Paused { since: now_ms, quiet_since: None };
                Some(Act::Pause)
            }
            (OnStorm::Kill, State::Running) if storms && !is_quiet => {
                self.state = State::Killed;
                Some(Act::Kill)
            }
            (_, State::Paused { since, quiet_since }) => {
                let quiet_since = is_quiet.then(|| quiet_since.unwrap_or(now_ms));
                let over = quiet_since.is_some_and(|at| now_ms.saturating_sub(at) >= QUIET_MS);
                if over || now_ms.saturating_sub(since) >= self.pause_ms {
                    let until = now_ms.saturating_add(self.pause_ms);
                    self.state = State::Spared { until };
                    return Some(Act::Resume);
                }
                self.state = State::Paused { since, quiet_since };
                None
            }
            (_, State::Spared { until }) if now_ms >= until => {
                self.state = State::Running;
                None
            }
            (_, State::Killed) if !storms => {
                self.state = State::Running;
                None
            }
            _ => None,
        }
    }
}
