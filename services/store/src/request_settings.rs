//! Timeouts and retries of requests to a remote store: S3 or a gateway.

use std::time::Duration;

use object_store::{BackoffConfig, RetryConfig};

/// The limit of a request with its body of at most one part: 16 MiB in 300 s is 56 kB/s.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest time that a store may be unreachable. A request is signed once and S3 refuses
/// signatures older than 15 minutes, so a longer limit would only end in another error.
const RETRY_TIMEOUT: Duration = Duration::from_secs(600);

pub(crate) fn retry_config() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(500),
            max_backoff: Duration::from_secs(10),
            base: 2.0,
        },
        max_retries: 200,
        retry_timeout: RETRY_TIMEOUT,
    }
}
