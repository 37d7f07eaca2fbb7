//! The retry delays of this crate: they double up to a cap and stay within a deadline.

use std::{
    cmp,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::time::Instant;

/// First delay. A server restarted on the same host is back within 100 ms.
const DELAY_FIRST: Duration = Duration::from_millis(20);
/// Longest delay: short enough to notice a recovered server quickly, long enough for a fleet of
/// thousands of agents.
const DELAY_MAX: Duration = Duration::from_secs(1);

/// The delays of one retry loop: 20 ms, 40 ms, … up to 1 s, each shortened by a random 0 to 25 %.
///
/// ```text
/// let mut backoff = RetryBackoff::with_deadline(deadline);
/// while request().await.is_err() && backoff.wait().await {}
/// ```
pub(crate) struct RetryBackoff {
    next: Duration,
    deadline: Option<Instant>,
}

impl RetryBackoff {
    /// Creates delays that end before `deadline`.
    pub(crate) fn with_deadline(deadline: Instant) -> Self {
        Self { next: DELAY_FIRST, deadline: Some(deadline) }
    }

    /// Creates delays without a deadline, for loops that another condition ends.
    pub(crate) fn without_deadline() -> Self {
        Self { next: DELAY_FIRST, deadline: None }
    }

    /// Waits for the next delay and returns true. Returns false at once if the deadline would pass
    /// during the delay.
    pub(crate) async fn wait(&mut self) -> bool {
        let pause = self.next.mul_f64(0.75 + 0.25 * jitter_fraction());
        if self.deadline.is_some_and(|deadline| Instant::now() + pause >= deadline) {
            return false;
        }
        self.next = cmp::min(self.next * 2, DELAY_MAX);
        tokio::time::sleep(pause).await;
        true
    }

    /// Restarts with the first delay, after a success.
    pub(crate) fn reset_delay(&mut self) {
        self.next = DELAY_FIRST;
    }
}

/// Returns a number in 0..1, taken from the clock, so that the members of a fleet do not reconnect
/// at the same moment.
pub(crate) fn jitter_fraction() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    f64::from(since.subsec_nanos() % 1_000_000) / 1_000_000.0
}
