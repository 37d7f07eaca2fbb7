//! The pass rate of a prompt over earlier cycles.

/// The judged and passed samples of one prompt; each older cycle counts half as much as the next.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PromptHistory {
    /// Decayed count.
    pub judged: f64,
    /// Decayed count.
    pub passed: f64,
}

impl PromptHistory {
    /// Halves the counts of older cycles.
    pub(crate) fn record_cycle(&mut self, judged: u32, passed: u32) {
        const OLDER_CYCLES_WEIGHT: f64 = 0.5;
        self.judged = OLDER_CYCLES_WEIGHT * self.judged + f64::from(judged);
        self.passed = OLDER_CYCLES_WEIGHT * self.passed + f64::from(passed);
    }

    /// Estimates the pass rate: the posterior mean with a uniform prior (Laplace's rule of
    /// succession), 0.5 for a prompt without samples.
    pub(crate) fn expected_pass_rate(&self) -> f64 {
        (self.passed + 1.0) / (self.judged + 2.0)
    }
}
