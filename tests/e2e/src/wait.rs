//! Polling for a condition.

use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(50);

/// Calls `find` until it returns a value, and panics after `limit`.
pub fn wait_until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(POLL);
    }
}
