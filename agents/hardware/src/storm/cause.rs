//! The most likely cause of a storm, derived from other readings at the same time.

use serde::Serialize;

use crate::telemetry::HostTelemetry;

/// A training counts as stalled when a step takes this many times its longest step,
const STALL_FACTOR: u64 = 2;

/// and at least this long.
const STALL_MIN_MS: u64 = 5_000;

/// The limit of a step's duration before the first interval is known.
const FIRST_STEP_MS: u64 = 120_000;

/// The share of time in which work waits for memory, above which memory is the cause.
const RECLAIM_PRESSURE_PERCENT: f64 = 20.0;

/// The intervals between a training's steps.
#[derive(Debug, Clone, Default)]
pub struct StepPace {
    steps_done: u32,
    at_ms: u64,
    longest_ms: u64,
}

impl StepPace {
    /// Creates the pace of a training with this number of steps done.
    pub fn from_step(steps_done: u32, now_ms: u64) -> Self {
        Self { steps_done, at_ms: now_ms, longest_ms: 0 }
    }

    /// Records the number of steps done.
    pub fn record_step(&mut self, done: u32, now_ms: u64) {
        if done == self.steps_done {
            return;
        }
        // The time before the first step is the start of the training, not an interval.
        if self.steps_done > 0 {
            self.longest_ms = self.longest_ms.max(now_ms.saturating_sub(self.at_ms));
        }
        (self.steps_done, self.at_ms) = (done, now_ms);
    }

    /// Resets the time of the last step after a pause that others caused.
    pub fn reset_clock(&mut self, now_ms: u64) {
        self.at_ms = now_ms;
    }

    /// Returns the time since the last step once it is longer than the limit.
    pub fn stalled_ms(&self, now_ms: u64) -> Option<u64> {
        let limit = match self.longest_ms {
            0 => FIRST_STEP_MS,
            longest => longest.saturating_mul(STALL_FACTOR).max(STALL_MIN_MS),
        };
        let still = now_ms.saturating_sub(self.at_ms);
        (still >= limit).then_some(still)
    }
}

/// The training on this host, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObservedTraining {
    NotTraining,
    /// A training of this agent, with the duration of its stall.
    Ours {
        stalled_ms: Option<u64>,
    },
    /// A foreign training of which only the checkpoints are known.
    Watched,
}

/// The likely cause of a storm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StormCause {
    EvaluationInTraining { stalled_s: Option<u64> },
    Reclaim,
    Unknown,
}

impl StormCause {
    /// Derives the cause from a sample and the training.
    pub fn from_telemetry(now: &HostTelemetry, training: ObservedTraining) -> Self {
        match training {
            ObservedTraining::Ours { stalled_ms: Some(ms) } => {
                Self::EvaluationInTraining { stalled_s: Some(ms / 1000) }
            }
            ObservedTraining::Watched => Self::EvaluationInTraining { stalled_s: None },
            ObservedTraining::NotTraining | ObservedTraining::Ours { stalled_ms: None }
                if is_reclaiming(now) =>
            {
                Self::Reclaim
            }
            ObservedTraining::NotTraining | ObservedTraining::Ours { stalled_ms: None } => {
                Self::Unknown
            }
        }
    }

    /// Describes the cause and the remedy for users.
    pub fn describe_remedy(self) -> String {
        let evaluates = "evaluation inside the training process";
        let remedy = "set eval_strategy=\"no\" and have checkpoints measured by an evaluator";
        match self {
            Self::EvaluationInTraining { stalled_s: Some(seconds) } => {
                format!("{evaluates} (no step for {seconds} s): {remedy}")
            }
            Self::EvaluationInTraining { stalled_s: None } => {
                format!("probably {evaluates} of another program: {remedy}")
            }
            Self::Reclaim => {
                "the kernel reclaims pages of mapped files: leave more memory free, or load models \
                 without mmap"
                    .into()
            }
            Self::Unknown => "no training of the agent is running, and memory is not short: \
                              another program on this box keeps mapping and unmapping memory"
                .into(),
        }
    }
}

fn is_reclaiming(now: &HostTelemetry) -> bool {
    let waits =
        now.pressure.memory.is_some_and(|memory| memory.some_avg10 > RECLAIM_PRESSURE_PERCENT);
    let scans = [now.reclaim.stalls_per_s, now.reclaim.scanned_per_s];
    waits || scans.into_iter().flatten().any(|rate| rate > 0.0)
}
