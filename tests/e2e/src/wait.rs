//! Waiting for a condition, never for a time.

use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(50);

/// Looks until `look` finds something.
///
/// # Panics
/// When it has not within `limit`.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(POLL);
    }
}
