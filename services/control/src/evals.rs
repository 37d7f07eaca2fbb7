//! Results of evaluations, perplexities and pass rates: those so far, and a stream of new ones.

use bus::{LogEvent, ReadError};
use futures::{Stream, TryStreamExt};
use wire::{
    FactBody, Record, RunId,
    v1::{self, eval_event::Result as EvalResult},
};

use crate::{FleetControl, RunError, runs::to_timestamp};

fn eval_filter(run: Option<&RunId>) -> Vec<String> {
    vec![format!("flotilla.{}.eval.>", run.map_or("*", RunId::as_str))]
}

/// The name by which users refer to the pass rate of a run's own held-out prompts.
pub const HELDOUT_SUITE: &str = "held out";

/// Returns `None` for other facts and other suites; an empty `suite` matches all.
fn eval_event(record: Record, suite: &str) -> Option<v1::EvalEvent> {
    let (is_wanted, result) = match record.fact.body {
        FactBody::Eval(eval) => (eval.suite == suite, EvalResult::Eval(eval)),
        FactBody::PassRates(rates) if suite.is_empty() => (true, EvalResult::PassRates(rates)),
        FactBody::PassRates(mut rates) => {
            rates.suites.retain(|measured| measured.suite == suite);
            if suite != HELDOUT_SUITE {
                rates.heldout = None;
                rates.pass_at.clear();
            }
            let has_rates = rates.heldout.is_some() || !rates.suites.is_empty();
            (has_rates, EvalResult::PassRates(rates))
        }
        _ => return None,
    };
    (is_wanted || suite.is_empty()).then(|| v1::EvalEvent {
        cursor: record.sequence,
        at: Some(to_timestamp(record.time_ms)),
        result: Some(result),
    })
}

impl FleetControl {
    /// Fails if a run does not exist, or has no suite of this name; an empty name is any.
    pub async fn require_suite(&self, run: &RunId, suite: &str) -> Result<(), RunError> {
        let found = self.bus.find_spec(run).await?.map(|record| record.fact.body);
        let Some(FactBody::Spec(spec)) = found else { return Err(RunError::Unknown(run.clone())) };
        check_suite(run, &spec, suite)
    }

    /// Returns the results so far in the order of measurement, for one run or all, and for one suite
    /// or all (an empty name). [`HELDOUT_SUITE`] is the run's own held-out prompts.
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

fn check_suite(run: &RunId, spec: &v1::Spec, suite: &str) -> Result<(), RunError> {
    let raft = match &spec.kind {
        Some(v1::spec::Kind::Raft(raft)) => Some(raft),
        _ => None,
    };
    let own = raft.and_then(|raft| raft.heldout.as_ref()).map(|_| HELDOUT_SUITE);
    let prompts = raft.into_iter().flat_map(|raft| &raft.prompt_suites);
    let texts = spec.suites.iter().map(|suite| suite.name.as_str());
    let suites: Vec<&str> =
        own.into_iter().chain(texts).chain(prompts.map(|suite| suite.name.as_str())).collect();
    if suite.is_empty() || suites.contains(&suite) {
        return Ok(());
    }
    let suites = if suites.is_empty() { "none".to_owned() } else { suites.join(", ") };
    Err(RunError::NoSuite { run: run.clone(), suite: suite.to_owned(), suites })
}

#[cfg(test)]
mod tests {
    use wire::{Fact, FactKey, Subject};

    use super::*;

    fn pass_rates() -> Record {
        let rate = |mean| Some(v1::cycle_done::Rate { mean, ..Default::default() });
        let carry = v1::cycle_done::SuiteRate {
            suite: "carry".into(),
            rate: rate(0.25),
            ..Default::default()
        };
        let rates = v1::PassRates { heldout: rate(0.5), suites: vec![carry], ..Default::default() };
        let subject = Subject::new(&"r-1".parse().unwrap(), FactKey::PassRates { cycle: 1 });
        let fact = Fact { subject, body: FactBody::PassRates(rates) };
        Record { sequence: 1, time_ms: 0, author: None, fact }
    }

    #[test]
    fn an_unknown_suite_is_named_with_those_of_the_run() {
        let raft = v1::spec::Raft {
            heldout: Some(v1::Blob::default()),
            prompt_suites: vec![v1::PromptSuite { name: "carry".into(), ..Default::default() }],
            ..Default::default()
        };
        let spec = v1::Spec {
            suites: vec![v1::Suite { name: "text".into(), ..Default::default() }],
            kind: Some(v1::spec::Kind::Raft(raft)),
            ..Default::default()
        };
        let check = |suite: &str| {
            let checked = check_suite(&"r-1".parse().unwrap(), &spec, suite);
            checked.map_err(|error| error.to_string())
        };
        for suite in ["", "text", "carry", HELDOUT_SUITE] {
            assert_eq!(check(suite), Ok(()), "{suite}");
        }
        let said = "run r-1 has no suite \"txt\"; its suites are: held out, text, carry (R107)";
        assert_eq!(check("txt"), Err(said.to_owned()));
    }

    #[test]
    fn a_suite_s_events_have_no_rates_of_others() {
        for (suite, expected) in [
            ("", Some((true, 1))),
            (HELDOUT_SUITE, Some((true, 0))),
            ("carry", Some((false, 1))),
            ("other", None),
        ] {
            let found = eval_event(pass_rates(), suite).and_then(|event| match event.result {
                Some(EvalResult::PassRates(rates)) => {
                    Some((rates.heldout.is_some(), rates.suites.len()))
                }
                _ => None,
            });
            assert_eq!(found, expected, "{suite}");
        }
    }
}
