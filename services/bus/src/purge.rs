//! Letting go of a cycle's bulky facts, once they are archived. Nothing else is ever removed.

use serde::Deserialize;
use serde_json::json;
use wire::{Place, RunId};

use crate::{Bus, STREAM, read::patiently, request::RequestError};

#[derive(Debug, thiserror::Error)]
#[error("let go of {filter}")]
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
    /// Removes the orders, samples and verdicts of a cycle up to a position of the log, and
    /// says how many there were. Repeating it is harmless.
    ///
    /// # Errors
    /// When the server refuses or does not answer; some may be gone then.
    pub async fn purge_cycle(
        &self,
        run: &RunId,
        cycle: u32,
        up_to: u64,
    ) -> Result<u64, PurgeError> {
        let mut purged = 0;
        for filter in Place::bulky_filters(run, cycle) {
            // The server keeps `seq` itself.
            let body = json!({ "filter": filter, "seq": up_to + 1 });
            let verb = format!("STREAM.PURGE.{STREAM}");
            let answer = patiently(|| self.api::<PurgeAnswer>(&verb, &body)).await;
            purged += answer.map_err(|source| PurgeError { filter, source })?.purged;
        }
        Ok(purged)
    }
}
