//! A training that stands still while its GPU has nothing to do: an interrupt was lost, or the
//! card hangs. It is told; whether to end it is for the limit on a worker's silence to say.

use crate::{storm::Training, telemetry::Telemetry};

/// Both for so long.
const LIMIT_MS: u64 = 300_000;

/// Since when the GPUs do nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Hang {
    idle_since: Option<u64>,
}

impl Hang {
    /// What is to be said of it, if anything is.
    pub fn hear(&mut self, now: &Telemetry, training: Training) -> Option<String> {
        let idle = now.gpu_busy().is_some_and(|busy| busy < 1.0);
        self.idle_since = idle.then(|| self.idle_since.unwrap_or(now.at_ms));
        let idle_ms = now.at_ms.saturating_sub(self.idle_since?);
        let Training::Ours { stalled_ms: Some(stalled_ms) } = training else { return None };
        (idle_ms.min(stalled_ms) >= LIMIT_MS).then(|| {
            let minutes = stalled_ms / 60_000;
            format!("no step for {minutes} min, and the GPU does nothing: it may hang")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::GpuNow;

    fn hear(looks: &[(u64, f64, Option<u64>)]) -> Vec<bool> {
        let mut hang = Hang::default();
        let mut hear = |&(second, busy, stalled_s): &(u64, f64, Option<u64>)| {
            let gpu = GpuNow { busy_percent: Some(busy), ..GpuNow::default() };
            let now = Telemetry { at_ms: second * 1000, gpus: vec![gpu], ..Telemetry::default() };
            let stalled_ms = stalled_s.map(|seconds| seconds * 1000);
            hang.hear(&now, Training::Ours { stalled_ms }).is_some()
        };
        looks.iter().map(&mut hear).collect()
    }

    #[test]
    fn a_hang_is_a_stall_and_an_idle_gpu_for_five_minutes_both() {
        assert_eq!(hear(&[(0, 0.0, None), (300, 0.0, Some(310))]), [false, true]);
        assert_eq!(hear(&[(0, 0.0, None), (300, 0.0, Some(200))]), [false, false]);
        assert_eq!(hear(&[(0, 0.0, None), (200, 90.0, None), (400, 0.0, Some(400))]), [false; 3]);
        let mut hang = Hang::default();
        let unknown = Telemetry { at_ms: 1 << 40, ..Telemetry::default() };
        let stalled = Training::Ours { stalled_ms: Some(1 << 40) };
        assert_eq!(hang.hear(&unknown, stalled), None, "a GPU that does not tell is not idle");
    }
}
