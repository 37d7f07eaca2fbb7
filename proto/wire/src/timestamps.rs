//! Converts times to the timestamp type of messages.

use std::time::Duration;

use crate::Timestamp;

/// Converts a duration since 1970 into a protobuf timestamp.
pub fn to_timestamp(since_1970: Duration) -> Timestamp {
    Timestamp {
        seconds: i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since_1970.subsec_nanos()).unwrap_or(0),
    }
}
