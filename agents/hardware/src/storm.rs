//! Storms of TLB shootdowns. A training that evaluates in its own process can have the kernel
//! take mapped weights away page by page, each page an interrupt for every core: the processor
//! is busy forgetting addresses and the GPU waits. Measured on a Strix Halo: 110 a second while a
//! process of its own evaluates, 340 000 and up to 1.2 million while the trainer does.
//!
//! Knows neither clock nor processes: samples in, levels out, each with hysteresis.

mod cause;
mod reaction;

use serde::Serialize;

use crate::telemetry::Telemetry;

pub use cause::{Cause, Pace, Training};
pub use reaction::{Act, OnStorm, Reaction};

/// A longer gap between samples says nothing of what was in between.
const GAP_MAX_MS: u64 = 30_000;

/// What counts as what.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// A second, for so long.
    pub warn_per_s: f64,
    pub warn_ms: u64,
    pub storm_per_s: f64,
    pub storm_ms: u64,
    /// Below it, for so long, all is calm again.
    pub clear_per_s: f64,
    pub clear_ms: u64,
    /// A storm costs something: more than this share of the cores is in the kernel, …
    pub system_share: f64,
    /// … or the GPUs are less busy than so many percent.
    pub gpu_busy_percent: f64,
}

impl Default for Thresholds {
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

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    #[default]
    Calm,
    Warn,
    Storm,
}

/// How the weather is.
#[derive(Debug, Clone, Default)]
pub struct Weather {
    thresholds: Thresholds,
    level: Level,
    heard_ms: Option<u64>,
    warning: Held,
    storming: Held,
    clearing: Held,
}

/// Since when something holds without a break.
#[derive(Debug, Clone, Copy, Default)]
struct Held(Option<u64>);

impl Held {
    /// Whether it has held for so long.
    fn hear(&mut self, holds: bool, now_ms: u64, for_ms: u64) -> bool {
        let since = holds.then(|| self.0.unwrap_or(now_ms));
        self.0 = since;
        since.is_some_and(|since| now_ms.saturating_sub(since) >= for_ms)
    }
}

impl Weather {
    pub fn new(thresholds: Thresholds) -> Self {
        Self { thresholds, ..Self::default() }
    }

    pub fn level(&self) -> Level {
        self.level
    }

    /// Takes a sample in. A sample without a rate changes nothing.
    pub fn hear(&mut self, now: &Telemetry) -> Level {
        let Some(rate) = now.tlb_per_s else { return self.level };
        let at = now.at_ms;
        if self.heard_ms.is_none_or(|before| at.abs_diff(before) > GAP_MAX_MS) {
            (self.warning, self.storming, self.clearing) = Default::default();
        }
        self.heard_ms = Some(at);
        let Thresholds { warn_per_s, warn_ms, storm_per_s, storm_ms, .. } = self.thresholds;
        let costs = self.costs(now);
        let warns = self.warning.hear(rate > warn_per_s, at, warn_ms);
        let storms = self.storming.hear(rate > storm_per_s && costs, at, storm_ms);
        let Thresholds { clear_per_s, clear_ms, .. } = self.thresholds;
        let clears = self.clearing.hear(rate < clear_per_s, at, clear_ms);
        self.level = match self.level {
            _ if storms => Level::Storm,
            Level::Calm if warns => Level::Warn,
            _ if clears => Level::Calm,
            level => level,
        };
        self.level
    }

    fn costs(&self, now: &Telemetry) -> bool {
        now.cpu.is_some_and(|cpu| cpu.system > self.thresholds.system_share)
            || now.gpu_busy().is_some_and(|busy| busy < self.thresholds.gpu_busy_percent)
    }
}

#[cfg(test)]
mod tests;
