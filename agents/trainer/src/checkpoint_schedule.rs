//! Decides which steps are saved. Pure; the PyTorch trainer has the same rules in `schedule.py`.

/// The schedule of a training's checkpoints. A crash should cost minutes, not the training. But
/// each saved step is also evaluated, so checkpoints that are due by time alone are far apart.
///
/// A step is saved if one of these holds:
///
/// - It is the last one.
/// - It is a multiple of the order's `save_every`.
/// - `save_s` seconds have passed since the last save.
/// - Nothing is saved yet and a tenth of `save_s` has passed.
/// - The order sets no `save_every`, the step ends a third of the training, and `save_s / 30`
///   passed.
#[derive(Debug, Clone)]
pub(crate) struct CheckpointSchedule {
    steps: u32,
    /// The interval in steps; 0 if the order sets none.
    every: u32,
    /// The longest time between saves in seconds.
    save_s: f64,
    /// The time of the last save, in seconds since the start.
    saved_at_s: f64,
    any_saved: bool,
}

/// The share of `save_s` after which the first step is saved. An early save shows whether saving
/// works at all.
const FIRST_SAVE_SHARE: f64 = 1.0 / 10.0;

/// The share of `save_s` that must pass between the thirds of a training whose order sets no
/// interval.
const THIRD_SAVE_SHARE: f64 = 1.0 / 30.0;

impl CheckpointSchedule {
    /// The time starts at 0 now. `any_saved` is true if the training resumes from a saved step.
    pub(crate) fn new(steps: u32, save_every: u32, save_s: f64, any_saved: bool) -> Self {
        // An interval of at least all steps saves nothing besides the last one.
        let every = if save_every < steps { save_every } else { 0 };
        Self { steps, every, save_s, saved_at_s: 0.0, any_saved }
    }

    /// `now_s` is the time in seconds since the start.
    pub(crate) fn is_due(&self, step: u32, now_s: f64) -> bool {
        let since = now_s - self.saved_at_s;
        step == self.steps
            || (self.every > 0 && step.is_multiple_of(self.every))
            || since >= self.save_s
            || (!self.any_saved && since >= self.save_s * FIRST_SAVE_SHARE)
            || (self.every == 0
                && step.is_multiple_of(self.steps.div_ceil(3).max(1))
                && since >= self.save_s * THIRD_SAVE_SHARE)
    }

    pub(crate) fn record_save(&mut self, now_s: f64) {
        (self.saved_at_s, self.any_saved) = (now_s, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps saved when each takes `step_s` seconds.
    fn saved(steps: u32, save_every: u32, step_s: f64) -> Vec<u32> {
        let mut schedule = CheckpointSchedule::new(steps, save_every, 600.0, false);
        let mut saved = Vec::new();
        for step in 1..=steps {
            let now = f64::from(step) * step_s;
            if schedule.is_due(step, now) {
                schedule.record_save(now);
                saved.push(step);
            }
        }
        saved
    }

    #[test]
    fn a_quick_training_saves_the_requested_steps_and_the_last_one() {
        assert_eq!(saved(50, 0, 0.01), [50]);
        assert_eq!(saved(50, 20, 0.01), [20, 40, 50]);
        assert_eq!(saved(57, 100, 0.01), [57], "an interval beyond the end saves only the end");
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
    fn a_training_resumed_from_a_saved_step_needs_no_early_save() {
        assert!(!CheckpointSchedule::new(100, 0, 600.0, true).is_due(5, 100.0));
        assert!(CheckpointSchedule::new(100, 0, 600.0, false).is_due(5, 100.0));
    }
}
