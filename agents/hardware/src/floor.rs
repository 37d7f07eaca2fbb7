//! What a box must keep free whose GPU takes its memory from the system's. Short of it the kernel
//! stands still before it ends anything: a training that was ended is better than a frozen box.

use crate::{storm::Training, telemetry::Telemetry};

/// A look that is short may be chance.
const FOR_MS: u64 = 1000;

/// Decides, look by look, when a training must go.
#[derive(Debug, Clone, Copy, Default)]
pub struct Floor {
    bytes: u64,
    since: Option<u64>,
}

impl Floor {
    /// Of `bytes` that must stay available; 0 never ends anything.
    pub fn new(bytes: u64) -> Self {
        Self { bytes, since: None }
    }

    /// The bytes available, when a training of ours must be ended for them; asked again only after
    /// as long.
    pub fn hear(&mut self, now: &Telemetry, training: Training) -> Option<u64> {
        let unified = !now.gpus.is_empty() && now.gpus.iter().all(|gpu| gpu.integrated);
        let ours = matches!(training, Training::Ours { .. });
        let low = now.memory.available.filter(|free| unified && ours && *free < self.bytes);
        let since = low.map(|_| self.since.unwrap_or(now.at_ms));
        let over = since.is_some_and(|since| now.at_ms.saturating_sub(since) >= FOR_MS);
        self.since = since.filter(|_| !over);
        low.filter(|_| over)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{GpuNow, MemoryNow};

    const OURS: Training = Training::Ours { stalled_ms: None };

    fn look(at_ms: u64, available: Option<u64>, gpus: &[bool]) -> Telemetry {
        let gpu = |&integrated: &bool| GpuNow { integrated, ..GpuNow::default() };
        Telemetry {
            at_ms,
            gpus: gpus.iter().map(gpu).collect(),
            memory: MemoryNow { available, ..MemoryNow::default() },
            ..Telemetry::default()
        }
    }

    #[test]
    fn a_training_goes_when_unified_memory_is_short_twice() {
        let mut floor = Floor::new(100);
        let mut hear = |at_ms, available| floor.hear(&look(at_ms, Some(available), &[true]), OURS);
        assert_eq!([hear(0, 99), hear(1000, 98)], [None, Some(98)]);
        assert_eq!([hear(2000, 97), hear(3000, 96)], [None, Some(96)], "it was another");
        assert_eq!([hear(4000, 99), hear(5000, 100), hear(6000, 99)], [None; 3], "it recovered");
    }

    #[test]
    fn nothing_goes_where_it_would_not_help() {
        let heard = |bytes, available, gpus: &[bool], training| {
            let mut floor = Floor::new(bytes);
            (0..5).find_map(|s| floor.hear(&look(s * 1000, available, gpus), training))
        };
        assert_eq!(heard(100, Some(1), &[true], OURS), Some(1));
        assert_eq!(heard(100, Some(1), &[true, false], OURS), None, "a card has its own memory");
        assert_eq!(heard(100, Some(1), &[], OURS), None, "no GPU");
        assert_eq!(heard(100, None, &[true], OURS), None, "not known");
        assert_eq!(heard(0, Some(0), &[true], OURS), None, "switched off");
        assert_eq!(heard(100, Some(1), &[true], Training::Watched), None, "not ours to end");
        assert_eq!(heard(100, Some(1), &[true], Training::No), None);
    }
}
