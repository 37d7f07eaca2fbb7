//! The learning rate of each step, as a share of its peak.

/// The shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LearningRateDecay {
    Constant,
    Linear,
    Cosine,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct LearningRateSchedule {
    pub(super) steps: usize,
    pub(super) warmup_ratio: f64,
    pub(super) decay: LearningRateDecay,
    pub(super) final_ratio: f64,
}

impl LearningRateSchedule {
    /// Returns the rate of a step (from 1). The schedule ends one step after the last, so that no
    /// step has a rate of 0.
    pub(super) fn rate_factor(&self, step: usize) -> f64 {
        let (step, steps) = (step as f64, self.steps as f64);
        let warmup = (self.warmup_ratio * steps).ceil().max(1.0);
        if step <= warmup {
            return step / warmup;
        }
        let progress = (step - warmup) / (steps - warmup + 1.0);
        let left = match self.decay {
            LearningRateDecay::Constant => 1.0,
            LearningRateDecay::Linear => 1.0 - progress,
            LearningRateDecay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.final_ratio + (1.0 - self.final_ratio) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_climbs_then_falls_towards_its_final_share() {
        let schedule = LearningRateSchedule {
            steps: 100,
            warmup_ratio: 0.1,
            decay: LearningRateDecay::Linear,
            final_ratio: 0.1,
        };
        let close = |schedule: &LearningRateSchedule, step, expected: f64| {
            let factor = schedule.rate_factor(step);
            assert!((factor - expected).abs() < 1e-12, "step {step}: {factor}");
        };
        let middle = LearningRateSchedule { steps: 99, ..schedule };
        for (schedule, step, expected) in
            [(schedule, 1, 0.1), (schedule, 10, 1.0), (middle, 55, 0.55), (middle, 99, 0.11)]
        {
            close(&schedule, step, expected);
        }
        close(&LearningRateSchedule { decay: LearningRateDecay::Cosine, ..middle }, 55, 0.55);
        close(&LearningRateSchedule { decay: LearningRateDecay::Constant, ..schedule }, 100, 1.0);
        close(&LearningRateSchedule { warmup_ratio: 1.0, ..schedule }, 100, 1.0);
    }

    #[test]
    fn however_few_steps_there_are_none_has_a_rate_of_0_and_one_the_peak() {
        for steps in [1, 2, 3, 7, 10_000_000] {
            for decay in
                [LearningRateDecay::Constant, LearningRateDecay::Linear, LearningRateDecay::Cosine]
            {
                for warmup_ratio in [0.0, 0.1, 0.5, 1.0] {
                    let schedule =
                        LearningRateSchedule { steps, warmup_ratio, decay, final_ratio: 0.0 };
                    let looked_at = [1, 2, 3, 4, 5, 6, 7, steps / 10, steps / 2, steps - 1, steps];
                    let factors = looked_at.map(|step| schedule.rate_factor(step.clamp(1, steps)));
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
