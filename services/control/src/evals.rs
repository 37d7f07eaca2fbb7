//! Evals: what was measured, and a stream of what is being measured.

use bus::{Followed, ReadError};
use futures::{Stream, TryStreamExt};
use wire::{Body, Record, RunId, v1};

use crate::{Control, runs::timestamp};

fn filter(run: Option<&RunId>) -> Vec<String> {
    vec![format!("flotilla.{}.eval.*.*.*", run.map_or("*", RunId::as_str))]
}

fn event(record: Record, suite: &str) -> Option<v1::EvalEvent> {
    let Body::Eval(eval) = record.fact.body else { return None };
    let wanted = suite.is_empty() || eval.suite == suite;
    wanted.then(|| v1::EvalEvent {
        cursor: record.sequence,
        at: Some(timestamp(record.time_ms)),
        eval: Some(eval),
    })
}

impl Control {
    /// Evals so far, in the order they were measured; of all runs and suites unless named.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn evals(
        &self,
        run: Option<&RunId>,
        suite: &str,
    ) -> Result<Vec<v1::EvalEvent>, ReadError> {
        let records = self.read_all(filter(run)).await?;
        Ok(records.into_iter().filter_map(|record| event(record, suite)).collect())
    }

    /// Evals after a cursor, then new ones as they are measured. Never ends by itself.
    pub fn watch_evals(
        &self,
        run: Option<&RunId>,
        suite: String,
        after: u64,
    ) -> impl Stream<Item = Result<v1::EvalEvent, ReadError>> + Send + use<> {
        self.bus.follow(filter(run), after).try_filter_map(move |followed| {
            let event = match followed {
                Followed::Record(record) => event(record, &suite),
                Followed::CaughtUp | Followed::Unreadable { .. } => None,
            };
            std::future::ready(Ok(event))
        })
    }
}
