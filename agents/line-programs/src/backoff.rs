//! The pause before a program that keeps failing is started again.

use std::time::Duration;

/// The first failure may be that of one request, so the next start does not wait.
const FREE_FAILURES: u32 = 1;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Counts processes that ended without an answer in between, and derives the pause.
#[derive(Debug, Default)]
pub(crate) struct RestartBackoff {
    failures: u32,
    last_problem: String,
}

impl RestartBackoff {
    pub(crate) fn record_answer(&mut self) {
        self.failures = 0;
    }

    pub(crate) fn record_failure(&mut self, problem: String) {
        self.failures = self.failures.saturating_add(1);
        self.last_problem = problem;
    }

    /// Returns the time between the last failure and the next start.
    pub(crate) fn pause(&self) -> Duration {
        match self.failures.checked_sub(FREE_FAILURES + 1) {
            None => Duration::ZERO,
            Some(doublings) => {
                let factor = 2_u32.saturating_pow(doublings.min(16));
                FIRST_PAUSE.saturating_mul(factor).min(PAUSE_MAX)
            }
        }
    }

    /// Describes the last failure, for a request that does not wait for the next start.
    pub(crate) fn describe_failures(&self, left: Duration) -> String {
        format!(
            "{}; it failed {} times in a row and is started again in {} s",
            self.last_problem,
            self.failures,
            left.as_secs() + 1
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_up_to_a_bound_and_ends_with_an_answer() {
        let mut backoff = RestartBackoff::default();
        let mut pauses = Vec::new();
        for _ in 0..5 {
            pauses.push(backoff.pause().as_millis());
            backoff.record_failure("it ended".into());
        }
        assert_eq!(pauses, [0, 0, 250, 500, 1000]);
        (0..100).for_each(|_| backoff.record_failure("it hangs".into()));
        assert_eq!(backoff.pause(), PAUSE_MAX);
        let text = backoff.describe_failures(Duration::from_millis(7500));
        assert_eq!(text, "it hangs; it failed 105 times in a row and is started again in 8 s");
        backoff.record_answer();
        assert_eq!(backoff.pause(), Duration::ZERO);
    }
}
