//! The wall clock of this machine.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the time since 1970 in seconds.
pub fn unix_time_s() -> u64 {
    unix_time_ms() / 1000
}

/// Returns the time since 1970 in milliseconds.
pub(crate) fn unix_time_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
