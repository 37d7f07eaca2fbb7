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
    /// `step` counts from 1. The peak is reached by some step, and the schedule ends one step
    /// behind the last, so that none is wasted on a rate of 0.
    pub(super) fn factor(&self, step: usize) -> f64 {
        let (step, steps) = (step as f64, self.steps as f64);
        let warmup = (self.warmup_ratio * steps).ceil().max(1.0);
        if step <= warmup {
            return step / warmup;
        }
        let progress = (step - warmup) / (steps - warmup + 1.0);
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
    fn the_rate_climbs_then_falls_towards_its_final_share() {
        let schedule =
            Schedule { steps: 100, warmup_ratio: 0.1, decay: Decay::Linear, final_ratio: 0.1 };
        let close = |schedule: &Schedule, step, expected: f64| {
            let factor = schedule.factor(step);
            assert!((factor - expected).abs() < 1e-12, "step {step}: {factor}");
        };
        let middle = Schedule { steps: 99, ..schedule };
        for (schedule, step, expected) in
            [(schedule, 1, 0.1), (schedule, 10, 1.0), (middle, 55, 0.55), (middle, 99, 0.11)]
        {
            close(&schedule, step, expected);
        }
        close(&Schedule { decay: Decay::Cosine, ..middle }, 55, 0.55);
        close(&Schedule { decay: Decay::Constant, ..schedule }, 100, 1.0);
        close(&Schedule { warmup_ratio: 1.0, ..schedule }, 100, 1.0);
    }

    #[test]
    fn however_few_steps_there_are_none_has_a_rate_of_0_and_one_the_peak() {
        for steps in [1, 2, 3, 7, 10_000_000] {
            for decay in [Decay::Constant, Decay::Linear, Decay::Cosine] {
                for warmup_ratio in [0.0, 0.1, 0.5, 1.0] {
                    let schedule = Schedule { steps, warmup_ratio, decay, final_ratio: 0.0 };
                    let looked_at = [1, 2, 3, 4, 5, 6, 7, steps / 10, steps / 2, steps - 1, steps];
                    let factors = looked_at.map(|step| schedule.factor(step.clamp(1, steps)));
                    assert!(
                        factors.iter().all(|factor| *factor > 0.0),
                        "{schedule:?}: {factors:?}"
                    );
                    assert!(factors.contains(&1.0), "{schedule:?}: {factors:?}");
                }
            }
        }
    }
}
