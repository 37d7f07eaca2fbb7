//! Which steps are saved. Pure; the PyTorch trainer has the same rules in `schedule.py`.

/// A crash may cost minutes, never the training. Each saved step is also evaluated, so what time
/// alone calls for is far apart.
#[derive(Debug, Clone)]
pub(crate) struct Cadence {
    steps: u32,
    /// 0 when the order leaves it open.
    every: u32,
    save_s: f64,
    saved_at_s: f64,
    any_saved: bool,
}

/// Of `save_s`: when the first one is saved, which shows early whether anything can be.
const FIRST: f64 = 1.0 / 10.0;

/// Of `save_s`: what lies at least between the thirds of a training that leaves it open.
const THIRD: f64 = 1.0 / 30.0;

impl Cadence {
    /// `any_saved`: it goes on from a step that was. Its time begins now, at 0.
    pub(crate) fn new(steps: u32, save_every: u32, save_s: f64, any_saved: bool) -> Self {
        // One that never comes before the end saves nothing.
        let every = if save_every < steps { save_every } else { 0 };
        Self { steps, every, save_s, saved_at_s: 0.0, any_saved }
    }

    pub(crate) fn due(&self, step: u32, now_s: f64) -> bool {
        let since = now_s - self.saved_at_s;
        step == self.steps
            || (self.every > 0 && step.is_multiple_of(self.every))
            || since >= self.save_s
            || (!self.any_saved && since >= self.save_s * FIRST)
            || (self.every == 0
                && step.is_multiple_of(self.steps.div_ceil(3).max(1))
                && since >= self.save_s * THIRD)
    }

    pub(crate) fn saved(&mut self, now_s: f64) {
        (self.saved_at_s, self.any_saved) = (now_s, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps saved when each takes so long.
    fn saved(steps: u32, save_every: u32, step_s: f64) -> Vec<u32> {
        let mut cadence = Cadence::new(steps, save_every, 600.0, false);
        let mut saved = Vec::new();
        for step in 1..=steps {
            let now = f64::from(step) * step_s;
            if cadence.due(step, now) {
                cadence.saved(now);
                saved.push(step);
            }
        }
        saved
    }

    #[test]
    fn a_quick_training_saves_what_it_was_asked_for_and_its_end() {
        assert_eq!(saved(50, 0, 0.01), [50]);
        assert_eq!(saved(50, 20, 0.01), [20, 40, 50]);
        assert_eq!(saved(57, 100, 0.01), [57], "a cadence beyond the end is none");
    }

    #[test]
    fn a_crash_costs_at_most_a_third_of_a_short_training() {
        assert_eq!(saved(57, 0, 1.65), [19, 38, 57], "57 steps in 94 s");
        assert_eq!(saved(30, 0, 10.0), [6, 10, 20, 30]);
        assert_eq!(saved(57, 100, 10.0), [6, 19, 38, 57]);
    }

    #[test]
    fn a_slow_training_saves_soon_and_then_by_time() {
        assert_eq!(saved(100, 0, 60.0)[..4], [1, 11, 21, 31]);
        assert_eq!(saved(100, 40, 60.0)[..6], [1, 11, 21, 31, 40, 50]);
    }

    #[test]
    fn what_goes_on_from_a_saved_step_needs_no_early_one() {
        assert!(!Cadence::new(100, 0, 600.0, true).due(5, 100.0));
        assert!(Cadence::new(100, 0, 600.0, false).due(5, 100.0));
    }
}
