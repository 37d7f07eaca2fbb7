//! The time in which a member must send or receive the bytes of a request or an answer.

use std::time::Duration;

/// The limit of a member's body, without the time that depends on its length.
pub(crate) const MEMBER_LIMIT: Duration = Duration::from_secs(60);
/// The least mean rate of a transfer in bytes per second. A slower one would occupy a connection for
/// too long; Flotilla's own clients cancel a part that they send more slowly.
const TRANSFER_RATE_MIN: u64 = 32 << 10;

/// Returns the time limit of a transfer of some bytes.
pub(crate) fn transfer_limit(bytes: u64) -> Duration {
    MEMBER_LIMIT + Duration::from_secs(bytes / TRANSFER_RATE_MIN)
}
