//! Results of evaluations, perplexities and pass rates: those so far, and a stream of new ones.

use bus::{LogEvent, ReadError};
use futures::{Stream, TryStreamExt};
use wire::{
    FactBody, Record, RunId,
    v1::{self, eval_event::Result as EvalResult},
};

use crate::{FleetControl, runs::to_timestamp};

fn eval_filter(run: Option<&RunId>) -> Vec<String> {
    vec![format!("flotilla.{}.eval.>", run.map_or("*", RunId::as_str))]
}

/// Returns `None` for other facts and other suites; an empty `suite` matches all.
fn eval_event(record: Record, suite: &str) -> Option<v1::EvalEvent> {
    let (wanted, result) = match record.fact.body {
        FactBody::Eval(eval) => (eval.suite == suite, EvalResult::Eval(eval)),
        FactBody::PassRates(rates) => {
            let wanted = rates.suites.iter().any(|measured| measured.suite == suite);
            (wanted, EvalResult::PassRates(rates))
        }
        _ => return None,
    };
    let wanted = wanted || suite.is_empty();
    wanted.then(|| v1::EvalEvent {
        cursor: record.sequence,
        at: Some(to_timestamp(record.time_ms)),
        result: Some(result),
    })
}

impl FleetControl {
    /// Returns the results so far in the order of measurement, for one run or all, and for one suite
    /// or all (an empty name).
    pub async fn list_evals(
        &self,
        run: Option<&RunId>,
        suite: &str,
    ) -> Result<Vec<v1::EvalEvent>, ReadError> {
        let records = self.read_records(eval_filter(run)).await?;
        Ok(records.into_iter().filter_map(|record| eval_event(record, suite)).collect())
    }

    /// Yields the results after a cursor, then new ones as they are measured, without end.
    pub fn watch_evals(
        &self,
        run: Option<&RunId>,
        suite: String,
        after: u64,
    ) -> impl Stream<Item = Result<v1::EvalEvent, ReadError>> + Send + use<> {
        self.bus.follow_facts(eval_filter(run), after).try_filter_map(move |followed| {
            let event = match followed {
                LogEvent::Record(record) => eval_event(record, &suite),
                LogEvent::CaughtUp | LogEvent::Unreadable { .. } => None,
            };
            std::future::ready(Ok(event))
        })
    }
}
