//! Retries of requests to the hub.

use std::time::Duration;

use crate::error::RequestError;

const ATTEMPTS_MAX: u32 = 5;
const BACKOFF_FIRST: Duration = Duration::from_secs(1);

/// Repeats an attempt while the network or the hub fails, after 1, 2, 4 and 8 seconds.
pub(crate) async fn retry_request<T>(
    attempt: impl AsyncFn() -> Result<T, RequestError>,
) -> Result<T, RequestError> {
    let mut backoff = BACKOFF_FIRST;
    for _ in 1..ATTEMPTS_MAX {
        match attempt().await {
            Err(error) if error.is_worth_retrying() => {}
            outcome => return outcome,
        }
        tokio::time::sleep(backoff).await;
        backoff *= 2;
    }
    attempt().await
}
