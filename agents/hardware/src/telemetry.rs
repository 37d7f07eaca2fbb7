//! Telemetry of a host: its GPUs, processor, memory and power as numbers, sampled on request. Rates
//! are relative to the previous sample. Unreadable or impossible values are absent; nothing fails,
//! and suspended cards are not woken.

mod cards;
mod counters;
mod warnings;

use serde::Serialize;

use crate::host_files::HostFiles;
use cards::CardList;
use counters::KernelCounters;

pub use cards::{GpuClock, GpuReading, GpuTemperature};
pub use counters::{MemoryUsage, PressureStats, StallPressure};
pub use warnings::telemetry_warnings;

/// Between searches for added or removed cards.
const CARD_SCAN_INTERVAL_MS: u64 = 60_000;

/// The longest gap between samples over which power is integrated; a longer one means that the host
/// was suspended.
const ENERGY_GAP_MAX_MS: u64 = 60_000;

/// One telemetry sample of a host.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct HostTelemetry {
    /// The time of the sample, by the caller's clock.
    pub at_ms: u64,
    /// The time of the last reading of the GPUs.
    pub sensors_at_ms: u64,
    /// In HIP's order.
    pub gpus: Vec<GpuReading>,
    pub cpu: Option<CpuUsage>,
    pub memory: MemoryUsage,
    pub pressure: PressureStats,
    /// The interrupts since boot.
    pub tlb_shootdowns: Option<u64>,
    pub tlb_per_s: Option<f64>,
    pub reclaim: ReclaimRates,
    /// The power of the GPUs and, if known, of the processor package. An integrated GPU reports the
    /// whole package.
    pub watts: Option<f64>,
    /// The energy since the sampler was created.
    pub joules: f64,
}

/// Shares of all cores' time, from 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct CpuUsage {
    pub busy: f64,
    /// The share in the kernel and its interrupts.
    pub system: f64,
}

/// The rates of memory reclaim and swapping, per second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ReclaimRates {
    /// Allocations that had to wait.
    pub stalls_per_s: Option<f64>,
    /// Pages scanned by waiting allocations.
    pub scanned_per_s: Option<f64>,
    pub swapped_in_per_s: Option<f64>,
    pub swapped_out_per_s: Option<f64>,
}

impl HostTelemetry {
    /// Returns the load of the busiest GPU in percent.
    pub fn max_gpu_busy(&self) -> Option<f64> {
        self.gpus.iter().filter_map(|gpu| gpu.busy_percent).reduce(f64::max)
    }

    /// Returns the temperature of the hottest GPU sensor in °C.
    pub fn max_celsius(&self) -> Option<f64> {
        let all = self.gpus.iter().flat_map(|gpu| &gpu.temperatures);
        all.map(|one| one.celsius).reduce(f64::max)
    }
}

/// A sampler that remembers the previous counters, from which rates are computed.
#[derive(Debug, Default)]
pub struct TelemetrySampler {
    cards: CardList,
    cards_scanned_ms: Option<u64>,
    gpus: Vec<GpuReading>,
    sensors_at_ms: Option<u64>,
    last_counters: Option<KernelCounters>,
    joules: f64,
}

impl TelemetrySampler {
    /// Takes a sample. Without `sensors` the GPU values are those of the last reading, because
    /// reading them keeps the cards awake.
    pub fn take_sample(
        &mut self,
        files: &dyn HostFiles,
        now_ms: u64,
        sensors: bool,
    ) -> HostTelemetry {
        if self.cards_scanned_ms.is_none_or(|at| now_ms.abs_diff(at) >= CARD_SCAN_INTERVAL_MS) {
            self.cards = CardList::find_cards(files);
            self.cards_scanned_ms = Some(now_ms);
        }
        if sensors || self.sensors_at_ms.is_none() {
            self.gpus = self.cards.read_cards(files);
            self.sensors_at_ms = Some(now_ms);
        }
        let (now, before) =
            (KernelCounters::read_counters(files, now_ms), self.last_counters.take());
        let since = |rate: fn(&KernelCounters) -> Option<u64>| {
            let before = before.as_ref()?;
            counters::rate_per_second(rate(before)?, rate(&now)?, now_ms.checked_sub(before.at_ms)?)
        };
        let watts =
            self.total_watts(since(|counters| counters.package_uj).map(|uj_per_s| uj_per_s / 1e6));
        let gap_ms = before.as_ref().and_then(|before| now_ms.checked_sub(before.at_ms));
        if let (Some(watts), Some(gap_ms)) = (watts, gap_ms.filter(|gap| *gap <= ENERGY_GAP_MAX_MS))
        {
            self.joules += watts * counters::to_seconds(gap_ms);
        }
        let telemetry = HostTelemetry {
            at_ms: now_ms,
            sensors_at_ms: self.sensors_at_ms.unwrap_or(now_ms),
            gpus: self.gpus.clone(),
            cpu: before.as_ref().and_then(|before| now.cpu?.usage_since(before.cpu?)),
            memory: MemoryUsage::read_memory(files),
            pressure: PressureStats::read_pressures(files),
            tlb_shootdowns: now.tlb,
            tlb_per_s: since(|counters| counters.tlb),
            reclaim: ReclaimRates {
                stalls_per_s: since(|counters| counters.stalls),
                scanned_per_s: since(|counters| counters.scanned),
                swapped_in_per_s: since(|counters| counters.swapped_in),
                swapped_out_per_s: since(|counters| counters.swapped_out),
            },
            watts,
            joules: self.joules,
        };
        self.last_counters = Some(now);
        telemetry
    }

    /// The package is not added if an integrated GPU already reports it.
    fn total_watts(&self, package: Option<f64>) -> Option<f64> {
        let has_power = |gpu: &&GpuReading| gpu.watts.is_some();
        let package =
            package.filter(|_| !self.gpus.iter().filter(has_power).any(|gpu| gpu.integrated));
        self.gpus.iter().filter_map(|gpu| gpu.watts).chain(package).reduce(|a, b| a + b)
    }
}

/// Returns the number of TLB shootdown interrupts of all cores since boot.
pub fn count_tlb_shootdowns(files: &dyn HostFiles) -> Option<u64> {
    counters::read_tlb_shootdowns(files)
}

#[cfg(test)]
pub(crate) mod tests;
