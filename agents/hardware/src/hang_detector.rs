//! The detector of a training that makes no progress while its GPU is idle, because an interrupt
//! was lost or the card hangs. It only warns; the limit of a worker's silence decides about ending
//! it.

use crate::{storm::ObservedTraining, telemetry::HostTelemetry};

/// The time for which both conditions must hold.
const HANG_MS: u64 = 300_000;

/// A detector of hung GPUs: it warns when the GPUs are below 1 % load and the training has done no
/// step, both for 5 minutes.
#[derive(Debug, Clone, Copy, Default)]
pub struct HangDetector {
    idle_since: Option<u64>,
}

impl HangDetector {
    /// Records a sample and returns a warning if the GPU may hang.
    pub fn observe_sample(
        &mut self,
        now: &HostTelemetry,
        training: ObservedTraining,
    ) -> Option<String> {
        let idle = now.max_gpu_busy().is_some_and(|busy| busy < 1.0);
        self.idle_since = idle.then(|| self.idle_since.unwrap_or(now.at_ms));
        let idle_ms = now.at_ms.saturating_sub(self.idle_since?);
        let ObservedTraining::Ours { stalled_ms: Some(stalled_ms) } = training else { return None };
        (idle_ms.min(stalled_ms) >= HANG_MS).then(|| {
            let minutes = stalled_ms / 60_000;
            format!("no step for {minutes} min, and the GPU is idle: it may hang")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::GpuReading;

    fn observe(samples: &[(u64, f64, Option<u64>)]) -> Vec<bool> {
        let mut hang = HangDetector::default();
        let mut observe = |&(second, busy, stalled_s): &(u64, f64, Option<u64>)| {
            let gpu = GpuReading { busy_percent: Some(busy), ..GpuReading::default() };
            let now =
                HostTelemetry { at_ms: second * 1000, gpus: vec![gpu], ..HostTelemetry::default() };
            let stalled_ms = stalled_s.map(|seconds| seconds * 1000);
            hang.observe_sample(&now, ObservedTraining::Ours { stalled_ms }).is_some()
        };
        samples.iter().map(&mut observe).collect()
    }

    #[test]
    fn a_hang_is_a_stall_and_an_idle_gpu_for_five_minutes_both() {
        assert_eq!(observe(&[(0, 0.0, None), (300, 0.0, Some(310))]), [false, true]);
        assert_eq!(observe(&[(0, 0.0, None), (300, 0.0, Some(200))]), [false, false]);
        assert_eq!(
            observe(&[(0, 0.0, None), (200, 90.0, None), (400, 0.0, Some(400))]),
            [false; 3]
        );
        let mut hang = HangDetector::default();
        let unknown = HostTelemetry { at_ms: 1 << 40, ..HostTelemetry::default() };
        let stalled = ObservedTraining::Ours { stalled_ms: Some(1 << 40) };
        assert_eq!(
            hang.observe_sample(&unknown, stalled),
            None,
            "a GPU without a reading is not idle"
        );
    }
}
