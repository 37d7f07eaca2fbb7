//! The detection of TLB shootdown storms. If a training evaluates in its own process, the kernel
//! may reclaim mapped weights page by page, and each page interrupts every core: the processor only
//! invalidates addresses and the GPU waits. Measured on a Strix Halo: 110 shootdowns per second
//! while a separate process evaluates, 340 000 to 1.2 million while the trainer does.
//!
//! This module knows neither clock nor processes: it receives samples and returns levels, each with
//! hysteresis.

mod cause;
mod response;

use serde::Serialize;

use crate::telemetry::HostTelemetry;

pub use cause::{ObservedTraining, StepPace, StormCause};
pub use response::{StormAction, StormResponder, StormResponse};

/// After a longer gap between samples the measured durations start again.
const SAMPLE_GAP_MAX_MS: u64 = 30_000;

/// The rates and durations of the levels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StormThresholds {
    /// The rate of shootdowns above which the level becomes `Warn` after `warn_ms`.
    pub warn_per_s: f64,
    pub warn_ms: u64,
    /// The rate above which the level becomes `Storm` after `storm_ms`, if the storm has a cost.
    pub storm_per_s: f64,
    pub storm_ms: u64,
    /// The rate below which the level returns to `Calm` after `clear_ms`.
    pub clear_per_s: f64,
    pub clear_ms: u64,
    /// A storm has a cost if more than this share of the cores' time is spent in the kernel,
    pub system_share: f64,
    /// or if the GPUs are less busy than this.
    pub gpu_busy_percent: f64,
}

impl Default for StormThresholds {
    fn default() -> Self {
        Self {
            warn_per_s: 50_000.0,
            warn_ms: 10_000,
            storm_per_s: 200_000.0,
            storm_ms: 5_000,
            clear_per_s: 10_000.0,
            clear_ms: 30_000,
            system_share: 0.6,
            gpu_busy_percent: 50.0,
        }
    }
}

/// The level of TLB shootdowns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StormLevel {
    #[default]
    Calm,
    Warn,
    Storm,
}

/// The detector of storms, with hysteresis.
///
/// Each telemetry sample has a rate of shootdowns per second. With the default thresholds:
///
/// - `Calm` → `Warn` when the rate is above 50 000 for 10 s;
/// - any level → `Storm` when the rate is above 200 000 for 5 s and it has a cost: more than 60 %
///   of the cores' time is spent in the kernel, or the GPUs are less than 50 % busy;
/// - any level → `Calm` when the rate is below 10 000 for 30 s.
///
/// A sample without a rate changes nothing. After a gap of more than 30 s all durations start
/// again, but the level stays.
#[derive(Debug, Clone, Default)]
pub struct StormDetector {
    thresholds: StormThresholds,
    level: StormLevel,
    last_sample_ms: Option<u64>,
    warning: HeldFor,
    storming: HeldFor,
    clearing: HeldFor,
}

/// The time since which a condition holds without interruption.
#[derive(Debug, Clone, Copy, Default)]
struct HeldFor(Option<u64>);

impl HeldFor {
    fn update_condition(&mut self, holds: bool, now_ms: u64, for_ms: u64) -> bool {
        let since = holds.then(|| self.0.unwrap_or(now_ms));
        self.0 = since;
        since.is_some_and(|since| now_ms.saturating_sub(since) >= for_ms)
    }
}

impl StormDetector {
    /// Creates a detector at `Calm`.
    pub fn new(thresholds: StormThresholds) -> Self {
        Self { thresholds, ..Self::default() }
    }

    pub fn current_level(&self) -> StormLevel {
        self.level
    }

    /// Records a sample and returns the level.
    pub fn observe_sample(&mut self, now: &HostTelemetry) -> StormLevel {
        let Some(rate) = now.tlb_per_s else { return self.level };
        let at = now.at_ms;
        if self.last_sample_ms.is_none_or(|before| at.abs_diff(before) > SAMPLE_GAP_MAX_MS) {
            (self.warning, self.storming, self.clearing) = Default::default();
        }
        self.last_sample_ms = Some(at);
        let StormThresholds { warn_per_s, warn_ms, storm_per_s, storm_ms, .. } = self.thresholds;
        let costs = self.has_cost(now);
        let warns = self.warning.update_condition(rate > warn_per_s, at, warn_ms);
        let storms = self.storming.update_condition(rate > storm_per_s && costs, at, storm_ms);
        let StormThresholds { clear_per_s, clear_ms, .. } = self.thresholds;
        let clears = self.clearing.update_condition(rate < clear_per_s, at, clear_ms);
        self.level = match self.level {
            _ if storms => StormLevel::Storm,
            StormLevel::Calm if warns => StormLevel::Warn,
            _ if clears => StormLevel::Calm,
            level => level,
        };
        self.level
    }

    fn has_cost(&self, now: &HostTelemetry) -> bool {
        now.cpu.is_some_and(|cpu| cpu.system > self.thresholds.system_share)
            || now.max_gpu_busy().is_some_and(|busy| busy < self.thresholds.gpu_busy_percent)
    }
}

#[cfg(test)]
mod tests;
