//! The learning rate of each step as a share of its peak.

/// What the learning rate does after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decay {
    Constant,
    Linear,
    Cosine,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    pub(super) steps: usize,
    pub(super) warmup_ratio: f64,
    pub(super) decay: Decay,
    pub(super) final_ratio: f64,
}

impl Schedule {
    /// `step` counts from 1, so that no step is wasted on a rate of 0.
    pub(super) fn factor(&self, step: usize) -> f64 {
        let (step, steps) = (step as f64, self.steps as f64);
        let warmup = (self.warmup_ratio * steps).ceil();
        if step < warmup {
            return step / warmup;
        }
        let progress = ((step - warmup) / (steps - warmup).max(1.0)).min(1.0);
        let left = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - progress,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.final_ratio + (1.0 - self.final_ratio) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_climbs_then_falls_to_its_final_share() {
        let schedule =
            Schedule { steps: 100, warmup_ratio: 0.1, decay: Decay::Linear, final_ratio: 0.1 };
        let close = |schedule: &Schedule, step, expected: f64| {
            let factor = schedule.factor(step);
            assert!((factor - expected).abs() < 1e-12, "step {step}: {factor}");
        };
        for (step, expected) in [(1, 0.1), (10, 1.0), (55, 0.55), (100, 0.1)] {
            close(&schedule, step, expected);
            close(&Schedule { decay: Decay::Cosine, ..schedule }, step, expected);
        }
        close(&Schedule { decay: Decay::Constant, ..schedule }, 100, 1.0);
        close(&Schedule { warmup_ratio: 1.0, ..schedule }, 100, 1.0);
    }
}
