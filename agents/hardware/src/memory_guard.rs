//! The guard of free memory on a host whose GPU uses system memory. When memory runs out, such a
//! host freezes before the kernel kills a process, so ending a training early is better.

use crate::{storm::ObservedTraining, telemetry::HostTelemetry};

/// A single low sample may be chance.
const LOW_MEMORY_MS: u64 = 1000;

/// The guard decides, at every telemetry sample, whether a training must be ended.
///
/// It acts only if all GPUs are integrated and a training of this agent runs. When less than the
/// configured number of bytes was available for one second, `check_memory` returns the available
/// bytes once, and the timer starts again.
#[derive(Debug, Clone, Copy, Default)]
pub struct MemoryGuard {
    bytes_min: u64,
    low_since: Option<u64>,
}

impl MemoryGuard {
    /// Creates a guard of `bytes` of available memory; 0 disables it.
    pub fn new(bytes_min: u64) -> Self {
        Self { bytes_min, low_since: None }
    }

    /// Returns the available bytes if a training of this agent must be ended for lack of memory;
    /// the next such result comes after `LOW_MEMORY_MS` at the earliest.
    pub fn check_memory(&mut self, now: &HostTelemetry, training: ObservedTraining) -> Option<u64> {
        let unified = !now.gpus.is_empty() && now.gpus.iter().all(|gpu| gpu.integrated);
        let ours = matches!(training, ObservedTraining::Ours { .. });
        let low = now.memory.available.filter(|free| unified && ours && *free < self.bytes_min);
        let since = low.map(|_| self.low_since.unwrap_or(now.at_ms));
        let over = since.is_some_and(|since| now.at_ms.saturating_sub(since) >= LOW_MEMORY_MS);
        self.low_since = since.filter(|_| !over);
        low.filter(|_| over)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{GpuReading, MemoryUsage};

    const OURS: ObservedTraining = ObservedTraining::Ours { stalled_ms: None };

    fn sample(at_ms: u64, available: Option<u64>, gpus: &[bool]) -> HostTelemetry {
        let gpu = |&integrated: &bool| GpuReading { integrated, ..GpuReading::default() };
        HostTelemetry {
            at_ms,
            gpus: gpus.iter().map(gpu).collect(),
            memory: MemoryUsage { available, ..MemoryUsage::default() },
            ..HostTelemetry::default()
        }
    }

    #[test]
    fn a_training_goes_when_unified_memory_is_short_twice() {
        let mut guard = MemoryGuard::new(100);
        let mut hear =
            |at_ms, available| guard.check_memory(&sample(at_ms, Some(available), &[true]), OURS);
        assert_eq!([hear(0, 99), hear(1000, 98)], [None, Some(98)]);
        assert_eq!([hear(2000, 97), hear(3000, 96)], [None, Some(96)], "it was another");
        assert_eq!([hear(4000, 99), hear(5000, 100), hear(6000, 99)], [None; 3], "it recovered");
    }

    #[test]
    fn nothing_goes_where_it_would_not_help() {
        let result = |bytes, available, gpus: &[bool], training| {
            let mut guard = MemoryGuard::new(bytes);
            (0..5).find_map(|s| guard.check_memory(&sample(s * 1000, available, gpus), training))
        };
        assert_eq!(result(100, Some(1), &[true], OURS), Some(1));
        assert_eq!(result(100, Some(1), &[true, false], OURS), None, "a card has its own memory");
        assert_eq!(result(100, Some(1), &[], OURS), None, "no GPU");
        assert_eq!(result(100, None, &[true], OURS), None, "not known");
        assert_eq!(result(0, Some(0), &[true], OURS), None, "switched off");
        assert_eq!(
            result(100, Some(1), &[true], ObservedTraining::Watched),
            None,
            "not ours to end"
        );
        assert_eq!(result(100, Some(1), &[true], ObservedTraining::NotTraining), None);
    }
}
