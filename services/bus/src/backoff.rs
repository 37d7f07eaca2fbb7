//! The one retry policy of this crate: waits that double up to a cap, within a deadline.

use std::{
    cmp,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::time::Instant;

/// A restarted server on the same machine is back within 100 ms.
const FIRST: Duration = Duration::from_millis(20);
/// Often enough to notice a recovered server at once, rare enough for a fleet of thousands.
const CAP: Duration = Duration::from_secs(1);

pub(crate) struct Backoff {
    next: Duration,
    deadline: Option<Instant>,
}

impl Backoff {
    pub(crate) fn until(deadline: Instant) -> Self {
        Self { next: FIRST, deadline: Some(deadline) }
    }

    /// For loops that end otherwise.
    pub(crate) fn endless() -> Self {
        Self { next: FIRST, deadline: None }
    }

    /// Waits; false, at once, when the deadline would pass meanwhile.
    pub(crate) async fn wait(&mut self) -> bool {
        let pause = self.next.mul_f64(0.75 + 0.25 * jitter());
        if self.deadline.is_some_and(|deadline| Instant::now() + pause >= deadline) {
            return false;
        }
        self.next = cmp::min(self.next * 2, CAP);
        tokio::time::sleep(pause).await;
        true
    }

    pub(crate) fn reset(&mut self) {
        self.next = FIRST;
    }
}

/// 0..1, so that a fleet does not come back in step.
pub(crate) fn jitter() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    f64::from(since.subsec_nanos() % 1_000_000) / 1_000_000.0
}
