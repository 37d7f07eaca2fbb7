//! What a box is doing: its GPUs, processor, memory and power, as numbers, once for each look.
//! Rates come from the look before. Whatever cannot be read, or is no sane number, is absent;
//! nothing fails, and a card that sleeps is left to sleep.

mod cards;
mod counters;
mod warnings;

use serde::Serialize;

use crate::files::Files;
use cards::Cards;
use counters::Counters;

pub use cards::{Clock, GpuNow, Temperature};
pub use counters::{MemoryNow, Pressure, Pressures};
pub use warnings::warnings;

/// Between looks for cards that came or went.
const LOOK_FOR_CARDS_MS: u64 = 60_000;

/// A longer gap between looks says nothing of the power in between: the box slept.
const ENERGY_GAP_MS: u64 = 60_000;

/// One look.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Telemetry {
    /// By the clock the sampler was given.
    pub at_ms: u64,
    /// When the GPUs were last asked.
    pub sensors_at_ms: u64,
    /// In HIP's order.
    pub gpus: Vec<GpuNow>,
    pub cpu: Option<CpuNow>,
    pub memory: MemoryNow,
    pub pressure: Pressures,
    /// Interrupts by which one core has others forget addresses, since boot and a second.
    pub tlb_shootdowns: Option<u64>,
    pub tlb_per_s: Option<f64>,
    pub reclaim: Reclaim,
    /// Of the GPUs and, where it is told, the processor's package; of an integrated GPU the whole
    /// package.
    pub watts: Option<f64>,
    /// Since the sampler began.
    pub joules: f64,
}

/// Shares of all cores' time, 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct CpuNow {
    pub busy: f64,
    /// In the kernel and its interrupts.
    pub system: f64,
}

/// How the kernel gets hold of memory, a second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Reclaim {
    /// Allocations that had to wait.
    pub stalls_per_s: Option<f64>,
    /// Pages looked at by those who wait.
    pub scanned_per_s: Option<f64>,
    pub swapped_in_per_s: Option<f64>,
    pub swapped_out_per_s: Option<f64>,
}

impl Telemetry {
    /// Of the busiest GPU, in percent.
    pub fn gpu_busy(&self) -> Option<f64> {
        self.gpus.iter().filter_map(|gpu| gpu.busy_percent).reduce(f64::max)
    }

    /// Of the hottest sensor of a GPU, in °C.
    pub fn hottest(&self) -> Option<f64> {
        let all = self.gpus.iter().flat_map(|gpu| &gpu.temperatures);
        all.map(|one| one.celsius).reduce(f64::max)
    }
}

/// Looks again and again, and remembers what rates need.
#[derive(Debug, Default)]
pub struct Sampler {
    cards: Cards,
    looked_for_cards_ms: Option<u64>,
    gpus: Vec<GpuNow>,
    sensors_at_ms: Option<u64>,
    last: Option<Counters>,
    joules: f64,
}

impl Sampler {
    /// One look. Without `sensors` the GPUs are as they were last: asking them keeps them awake.
    pub fn sample(&mut self, files: &dyn Files, now_ms: u64, sensors: bool) -> Telemetry {
        if self.looked_for_cards_ms.is_none_or(|at| now_ms.abs_diff(at) >= LOOK_FOR_CARDS_MS) {
            self.cards = Cards::find(files);
            self.looked_for_cards_ms = Some(now_ms);
        }
        if sensors || self.sensors_at_ms.is_none() {
            self.gpus = self.cards.look(files);
            self.sensors_at_ms = Some(now_ms);
        }
        let (now, before) = (Counters::read(files, now_ms), self.last.take());
        let since = |rate: fn(&Counters) -> Option<u64>| {
            let before = before.as_ref()?;
            counters::rate(rate(before)?, rate(&now)?, now_ms.checked_sub(before.at_ms)?)
        };
        let watts =
            self.watts(since(|counters| counters.package_uj).map(|uj_per_s| uj_per_s / 1e6));
        let gap_ms = before.as_ref().and_then(|before| now_ms.checked_sub(before.at_ms));
        if let (Some(watts), Some(gap_ms)) = (watts, gap_ms.filter(|gap| *gap <= ENERGY_GAP_MS)) {
            self.joules += watts * counters::seconds(gap_ms);
        }
        let telemetry = Telemetry {
            at_ms: now_ms,
            sensors_at_ms: self.sensors_at_ms.unwrap_or(now_ms),
            gpus: self.gpus.clone(),
            cpu: before.as_ref().and_then(|before| now.cpu?.since(before.cpu?)),
            memory: MemoryNow::read(files),
            pressure: Pressures::read(files),
            tlb_shootdowns: now.tlb,
            tlb_per_s: since(|counters| counters.tlb),
            reclaim: Reclaim {
                stalls_per_s: since(|counters| counters.stalls),
                scanned_per_s: since(|counters| counters.scanned),
                swapped_in_per_s: since(|counters| counters.swapped_in),
                swapped_out_per_s: since(|counters| counters.swapped_out),
            },
            watts,
            joules: self.joules,
        };
        self.last = Some(now);
        telemetry
    }

    /// An integrated GPU tells of the whole package, which must not be counted twice.
    fn watts(&self, package: Option<f64>) -> Option<f64> {
        let told = |gpu: &&GpuNow| gpu.watts.is_some();
        let package = package.filter(|_| !self.gpus.iter().filter(told).any(|gpu| gpu.integrated));
        self.gpus.iter().filter_map(|gpu| gpu.watts).chain(package).reduce(|a, b| a + b)
    }
}

/// Interrupts for forgetting addresses since boot, of all cores.
pub fn tlb_shootdowns(files: &dyn Files) -> Option<u64> {
    counters::tlb(files)
}

#[cfg(test)]
pub(crate) mod tests;
