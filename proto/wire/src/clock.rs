//! The wall clock of this machine. The pure cores must not call it; their `clippy.toml` bans it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::{Timestamp, to_timestamp};

/// Returns the time since 1970-01-01 UTC. A clock set before that gives zero.
pub fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns the time since 1970-01-01 UTC in whole seconds.
pub fn unix_seconds() -> u64 {
    unix_time().as_secs()
}

/// Returns the time since 1970-01-01 UTC in whole milliseconds.
pub fn unix_millis() -> u64 {
    u64::try_from(unix_time().as_millis()).unwrap_or(u64::MAX)
}

/// Returns the minute of the day by this machine's clock and time zone; UTC if it has none.
pub fn minute_of_day() -> u16 {
    let time = jiff::Zoned::now().time();
    let minute = i16::from(time.hour()) * 60 + i16::from(time.minute());
    u16::try_from(minute).unwrap_or(0)
}

/// Returns the current time as the timestamp type of messages.
pub fn now() -> Timestamp {
    to_timestamp(unix_time())
}
