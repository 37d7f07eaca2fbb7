//! From the log to a sink, and on from where the sink is.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bus::{Bus, Followed, ReadError};
use futures::StreamExt;
use tokio_util::sync::CancellationToken;
use wire::{Body, Record, RunId};

use crate::{
    Sink, SinkError,
    points::{Course, Told},
};

/// Facts that are given to a sink at once.
const TOGETHER_MAX: usize = 512;
/// Between two tries at a tracker that is away: twice as long each time.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_LAST: Duration = Duration::from_secs(30);
/// An outage is spoken of again so often.
const REMIND_EVERY: Duration = Duration::from_secs(60);

/// What the log keeps for good, as it stands behind a run's name: all that has figures.
const SMALL: [&str; 9] = [
    "spec",
    "control.*",
    "selection.*",
    "checkpoint.>",
    "eval.>",
    "failure.>",
    "quarantine.>",
    "cycle.*.done",
    "done",
];

/// What is fed.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Empty: all there are, and all that will be.
    pub runs: Vec<RunId>,
    /// Also orders, samples and verdicts, as far as the log still has them.
    pub everything: bool,
    /// Ends when all there is now has been taken.
    pub once: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum FeedError {
    #[error("read the log")]
    Read(#[from] ReadError),
    #[error(transparent)]
    Sink(SinkError),
    #[error("there is no run {0}; `flotilla run list` shows which there are (R101)")]
    Unknown(RunId),
}

/// Feeds until stopped, or to the end of what there is. A tracker that is away is waited for.
/// `fed` hears of each run, the place of the last fact that was taken, and how many were taken now.
///
/// # Errors
/// When the log cannot be read, a tracker refuses for good, or a run that was asked for is not
/// there.
pub async fn feed(
    bus: &Bus,
    sink: impl Sink,
    options: &Options,
    stop: &CancellationToken,
    fed: impl FnMut(&RunId, u64, usize),
) -> Result<(), FeedError> {
    let mut feeding = Feeding { sink, runs: BTreeMap::new(), stop, fed };
    let mut facts = bus.follow(filters(options), 0).ready_chunks(TOGETHER_MAX);
    while let Some(Some(chunk)) = stop.run_until_cancelled(facts.next()).await {
        let mut records: BTreeMap<RunId, Vec<Record>> = BTreeMap::new();
        let mut caught_up = false;
        for followed in chunk {
            let followed = match followed {
                Ok(followed) => followed,
                Err(error @ ReadError::WentBack { .. }) => return Err(error.into()),
                Err(error) => {
                    tracing::warn!(error = wire::chain(&error), "the log is away; trying again");
                    continue;
                }
            };
            match followed {
                Followed::Record(record) => {
                    records.entry(record.fact.subject.run.clone()).or_default().push(record);
                }
                Followed::CaughtUp => caught_up = true,
                Followed::Unreadable { subject, .. } => tracing::warn!(subject, "is no fact"),
            }
        }
        for (run, records) in records {
            feeding.take(&run, records).await.map_err(FeedError::Sink)?;
        }
        if caught_up {
            let missing = options.runs.iter().find(|run| !feeding.runs.contains_key(run));
            if let Some(run) = missing {
                return Err(FeedError::Unknown(run.clone()));
            }
            if options.once {
                break;
            }
        }
    }
    Ok(())
}

fn filters(options: &Options) -> Vec<String> {
    let all = ["*".to_owned()];
    let named: Vec<String> = options.runs.iter().map(ToString::to_string).collect();
    let runs = if named.is_empty() { &all[..] } else { &named };
    let kinds = if options.everything { &[">"][..] } else { &SMALL };
    let pairs = runs.iter().flat_map(|run| kinds.iter().map(move |kind| (run, kind)));
    pairs.map(|(run, kind)| format!("flotilla.{run}.{kind}")).collect()
}

struct Feeding<'a, S, F> {
    sink: S,
    runs: BTreeMap<RunId, Fed>,
    stop: &'a CancellationToken,
    fed: F,
}

/// A run, and how far the tracker is with it.
struct Fed {
    course: Course,
    cursor: u64,
}

impl<S: Sink, F: FnMut(&RunId, u64, usize)> Feeding<'_, S, F> {
    async fn take(&mut self, run: &RunId, records: Vec<Record>) -> Result<(), SinkError> {
        let Some(last) = records.last().map(|record| record.sequence) else { return Ok(()) };
        if !self.runs.contains_key(run) {
            // Without its beginning a run has no steps.
            if !records.first().is_some_and(|it| matches!(it.fact.body, Body::Spec(_))) {
                tracing::warn!(%run, "its spec is no longer in the log: it is left out");
                return Ok(());
            }
            let Some(cursor) = self.patiently(async |sink| sink.cursor(run).await).await? else {
                return Ok(());
            };
            self.runs.insert(run.clone(), Fed { course: Course::default(), cursor });
        }
        let Some(known) = self.runs.get_mut(run) else { return Ok(()) };
        let told = records.into_iter().map(|record| known.course.tell(Arc::new(record)));
        let cursor = known.cursor;
        let told: Vec<Told> = told.collect();
        let news: Vec<Told> =
            told.into_iter().filter(|told| told.record.sequence > cursor).collect();
        if news.is_empty() {
            return Ok(());
        }
        if self.patiently(async |sink| sink.take(run, &news).await).await?.is_some() {
            self.runs.entry(run.clone()).and_modify(|known| known.cursor = last);
            (self.fed)(run, last, news.len());
        }
        Ok(())
    }

    /// Again and again while the tracker is away; `None`: it was stopped.
    async fn patiently<T>(
        &mut self,
        mut ask: impl AsyncFnMut(&mut S) -> Result<T, SinkError>,
    ) -> Result<Option<T>, SinkError> {
        let (mut wait, mut reminded) = (RETRY_FIRST, None::<Instant>);
        loop {
            let asked = self.stop.run_until_cancelled(ask(&mut self.sink)).await;
            let error = match asked {
                None => return Ok(None),
                Some(Ok(done)) => return Ok(Some(done)),
                Some(Err(error @ SinkError::Never { .. })) => return Err(error),
                Some(Err(error @ SinkError::Later { .. })) => error,
            };
            if reminded.is_none_or(|at| at.elapsed() > REMIND_EVERY) {
                reminded = Some(Instant::now());
                tracing::warn!(%error, "the tracker does not take it; trying until it does");
            }
            if self.stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return Ok(None);
            }
            wait = (wait * 2).min(RETRY_LAST);
        }
    }
}
