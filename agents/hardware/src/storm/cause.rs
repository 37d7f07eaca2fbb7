//! What a storm most likely comes from, by what else is seen while it lasts.

use serde::Serialize;

use crate::telemetry::Telemetry;

/// A training whose steps are seen is at something else when it takes so many times its longest
/// step, …
const TIMES_LONGEST: u64 = 2;

/// … and at least so long.
const STALL_MIN_MS: u64 = 5_000;

/// Before there is a rhythm, a step may take so long.
const FIRST_STEP_MS: u64 = 120_000;

/// Work waits for memory so many percent of the time when memory is what it is about.
const MEMORY_PRESSURE: f64 = 20.0;

/// How a training's steps follow each other.
#[derive(Debug, Clone, Default)]
pub struct Pace {
    done: u32,
    at_ms: u64,
    longest_ms: u64,
}

impl Pace {
    /// So many steps were done by then.
    pub fn begin(done: u32, now_ms: u64) -> Self {
        Self { done, at_ms: now_ms, longest_ms: 0 }
    }

    pub fn note(&mut self, done: u32, now_ms: u64) {
        if done == self.done {
            return;
        }
        // What came before the first step was the start, which says nothing of the rhythm.
        if self.done > 0 {
            self.longest_ms = self.longest_ms.max(now_ms.saturating_sub(self.at_ms));
        }
        (self.done, self.at_ms) = (done, now_ms);
    }

    /// It was kept from working until then.
    pub fn kept(&mut self, now_ms: u64) {
        self.at_ms = now_ms;
    }

    /// For how long it has stood still, once that is longer than any step.
    pub fn stalled_ms(&self, now_ms: u64) -> Option<u64> {
        let limit = match self.longest_ms {
            0 => FIRST_STEP_MS,
            longest => longest.saturating_mul(TIMES_LONGEST).max(STALL_MIN_MS),
        };
        let still = now_ms.saturating_sub(self.at_ms);
        (still >= limit).then_some(still)
    }
}

/// What trains on this box, as far as it is seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Training {
    No,
    /// Our own: whether its steps stand still, and for how long.
    Ours {
        stalled_ms: Option<u64>,
    },
    /// Somebody else's, whose checkpoints alone are seen.
    Watched,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    EvaluationInTraining { stalled_s: Option<u64> },
    Reclaim,
    Unknown,
}

impl Cause {
    pub fn of(now: &Telemetry, training: Training) -> Self {
        match training {
            Training::Ours { stalled_ms: Some(ms) } => {
                Self::EvaluationInTraining { stalled_s: Some(ms / 1000) }
            }
            Training::Watched => Self::EvaluationInTraining { stalled_s: None },
            Training::No | Training::Ours { stalled_ms: None } if reclaims(now) => Self::Reclaim,
            Training::No | Training::Ours { stalled_ms: None } => Self::Unknown,
        }
    }

    /// For people: what it is and what helps.
    pub fn describe(self) -> String {
        let evaluates = "evaluation inside the training process";
        let remedy = "set eval_strategy=\"no\" and have checkpoints measured by an evaluator";
        match self {
            Self::EvaluationInTraining { stalled_s: Some(seconds) } => {
                format!("{evaluates} (no step for {seconds} s): {remedy}")
            }
            Self::EvaluationInTraining { stalled_s: None } => {
                format!("probably {evaluates}, which is not ours: {remedy}")
            }
            Self::Reclaim => {
                "the kernel takes pages of mapped files away: leave more memory free, \
                              or load models without mmap"
                    .into()
            }
            Self::Unknown => "no training of ours is at it, and memory is not short: something \
                              else on this box maps and unmaps memory all the time"
                .into(),
        }
    }
}

fn reclaims(now: &Telemetry) -> bool {
    let waits = now.pressure.memory.is_some_and(|memory| memory.some_avg10 > MEMORY_PRESSURE);
    let scans = [now.reclaim.stalls_per_s, now.reclaim.scanned_per_s];
    waits || scans.into_iter().flatten().any(|rate| rate > 0.0)
}
