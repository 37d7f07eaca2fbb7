//! Purges the bulky facts of a cycle once they are archived. No other facts are ever removed.

use serde::Deserialize;
use serde_json::json;
use wire::{FactKey, RunId};

use crate::{Bus, LOG_STREAM, point_read::with_retries, request_error::RequestError};

/// A purge that the server refused or did not answer.
#[derive(Debug, thiserror::Error)]
#[error("purge {filter}")]
pub struct PurgeError {
    filter: String,
    #[source]
    source: RequestError,
}

#[derive(Deserialize)]
struct PurgeAnswer {
    purged: u64,
}

impl Bus {
    /// Removes the bulky facts of a cycle up to and including the position `up_to`, and returns
    /// their number. Repeating the call is harmless; after an error some may be removed.
    pub async fn purge_cycle(
        &self,
        run: &RunId,
        cycle: u32,
        up_to: u64,
    ) -> Result<u64, PurgeError> {
        let mut purged = 0;
        for filter in FactKey::bulky_filters(run, cycle) {
            // The server keeps the message at `seq` itself.
            let body = json!({ "filter": filter, "seq": up_to + 1 });
            let verb = format!("STREAM.PURGE.{LOG_STREAM}");
            let answer = with_retries(|| self.call_api::<PurgeAnswer>(&verb, &body)).await;
            purged += answer.map_err(|source| PurgeError { filter, source })?.purged;
        }
        Ok(purged)
    }
}
