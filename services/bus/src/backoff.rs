//! Retry delays that double up to a cap and stay within a deadline.

use std::{cmp, time::Duration};

use tokio::time::Instant;

/// A server restarted on the same host is back within 100 ms.
const DELAY_FIRST: Duration = Duration::from_millis(20);
/// Short enough to notice a recovered server quickly, long enough for thousands of agents.
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
    pub(crate) fn with_deadline(deadline: Instant) -> Self {
        Self { next: DELAY_FIRST, deadline: Some(deadline) }
    }

    pub(crate) fn without_deadline() -> Self {
        Self { next: DELAY_FIRST, deadline: None }
    }

    /// Returns false at once if the deadline would pass during the delay.
    pub(crate) async fn wait(&mut self) -> bool {
        let pause = self.next.mul_f64(0.75 + 0.25 * jitter_fraction());
        if self.deadline.is_some_and(|deadline| Instant::now() + pause >= deadline) {
            return false;
        }
        self.next = cmp::min(self.next * 2, DELAY_MAX);
        tokio::time::sleep(pause).await;
        true
    }

    pub(crate) fn reset_delay(&mut self) {
        self.next = DELAY_FIRST;
    }
}

/// Returns a number in 0..1, taken from the clock, so that members do not reconnect at the same
/// moment.
pub(crate) fn jitter_fraction() -> f64 {
    f64::from(wire::clock::unix_time().subsec_nanos() % 1_000_000) / 1_000_000.0
}
