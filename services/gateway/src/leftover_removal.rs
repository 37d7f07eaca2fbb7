//! Removes the leftovers of interrupted uploads from the store, when the gateway starts and every
//! hour.

use std::{convert::Infallible, time::Duration};

use store::{LEFTOVER_AGE, Store};
use tokio::time::interval;

use crate::call_counts::CallCounts;

const REMOVAL_INTERVAL: Duration = Duration::from_secs(3600);

/// Removes leftovers and counts them, at once and then every hour, until dropped.
pub(crate) async fn remove_leftovers_hourly(store: &Store, counts: &CallCounts) -> Infallible {
    let mut times = interval(REMOVAL_INTERVAL);
    loop {
        times.tick().await;
        match store.remove_leftovers(LEFTOVER_AGE).await {
            Ok(removed) => counts.record_leftovers(removed),
            Err(error) => {
                let error = wire::format_error_chain(&error);
                tracing::warn!(error, "cannot search the store for abandoned uploads");
            }
        }
    }
}
