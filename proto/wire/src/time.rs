//! Times as messages have them.

use std::time::Duration;

use crate::Timestamp;

/// A time by its distance from 1970.
pub fn timestamp(since_1970: Duration) -> Timestamp {
    Timestamp {
        seconds: i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since_1970.subsec_nanos()).unwrap_or(0),
    }
}
