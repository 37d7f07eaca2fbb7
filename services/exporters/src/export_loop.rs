//! The export loop: it reads the log and passes updates to an exporter, starting at the exporter's
//! cursor.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bus::{Bus, LogEvent, ReadError};
use futures::StreamExt;
use tokio_util::sync::CancellationToken;
use wire::{FactBody, Record, RunId};

use crate::{
    ExporterError, RunExporter,
    metric_points::{RunProgress, RunUpdate},
};

const BATCH_MAX: usize = 512;
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const LONGEST_BACKOFF: Duration = Duration::from_secs(30);
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// The subjects, behind the name of a run, of the facts that the log keeps permanently. They
/// include all facts with metrics.
const RETAINED_SUBJECTS: [&str; 10] = [
    "spec",
    "watched",
    "control.*",
    "selection.*",
    "checkpoint.>",
    "eval.>",
    "failure.>",
    "quarantine.>",
    "cycle.*.done",
    "done",
];

#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// Empty for all present and future runs.
    pub runs: Vec<RunId>,
    /// True to also export orders, samples and verdicts that the log still has.
    pub everything: bool,
    /// True to stop after the facts that exist now.
    pub once: bool,
}

/// The reason why an export ended early.
#[derive(Debug, thiserror::Error)]
pub enum ExportRunsError {
    #[error("read the log")]
    Read(#[from] ReadError),
    #[error(transparent)]
    Exporter(ExporterError),
    #[error("there is no run {0}; `flotilla run list` lists all (R101)")]
    Unknown(RunId),
}

/// Exports runs until `stop` is cancelled, or to the end of the log if `options.once` is set. Waits
/// while the tool is unreachable. After each batch, `fed` is called with the run, the sequence of
/// the last exported fact, and the number of facts.
pub async fn export_runs(
    bus: &Bus,
    sink: impl RunExporter,
    options: &ExportOptions,
    stop: &CancellationToken,
    fed: impl FnMut(&RunId, u64, usize),
) -> Result<(), ExportRunsError> {
    let mut feeding = ExportLoop { exporter: sink, runs: BTreeMap::new(), stop, on_progress: fed };
    let mut facts = bus.follow_facts(subject_filters(options), 0).ready_chunks(BATCH_MAX);
    while let Some(Some(chunk)) = stop.run_until_cancelled(facts.next()).await {
        let mut records: BTreeMap<RunId, Vec<Record>> = BTreeMap::new();
        let mut caught_up = false;
        for followed in chunk {
            let followed = match followed {
                Ok(followed) => followed,
                Err(error @ ReadError::Truncated { .. }) => return Err(error.into()),
                Err(error) => {
                    tracing::warn!(
                        error = wire::format_error_chain(&error),
                        "the log is unavailable; retrying"
                    );
                    continue;
                }
            };
            match followed {
                LogEvent::Record(record) => {
                    records.entry(record.fact.subject.run.clone()).or_default().push(record);
                }
                LogEvent::CaughtUp => caught_up = true,
                LogEvent::Unreadable { subject, .. } => tracing::warn!(subject, "is no fact"),
            }
        }
        for (run, records) in records {
            feeding.export_batch(&run, records).await.map_err(ExportRunsError::Exporter)?;
        }
        if caught_up {
            let missing = options.runs.iter().find(|run| !feeding.runs.contains_key(run));
            if let Some(run) = missing {
                return Err(ExportRunsError::Unknown(run.clone()));
            }
            if options.once {
                break;
            }
        }
    }
    Ok(())
}

fn subject_filters(options: &ExportOptions) -> Vec<String> {
    let all = ["*".to_owned()];
    let named: Vec<String> = options.runs.iter().map(ToString::to_string).collect();
    let runs = if named.is_empty() { &all[..] } else { &named };
    let kinds = if options.everything { &[">"][..] } else { &RETAINED_SUBJECTS };
    let pairs = runs.iter().flat_map(|run| kinds.iter().map(move |kind| (run, kind)));
    pairs.map(|(run, kind)| format!("flotilla.{run}.{kind}")).collect()
}

/// The state of an export.
///
/// On the first batch of a run it reads the exporter's cursor. All facts pass through
/// [`RunProgress`], which counts optimizer steps, but only facts after the cursor are exported. A
/// transient error is retried without limit, with backoff from 0.5 s to 30 s; a permanent error
/// ends the export.
struct ExportLoop<'a, S, F> {
    exporter: S,
    runs: BTreeMap<RunId, ExportState>,
    stop: &'a CancellationToken,
    on_progress: F,
}

struct ExportState {
    /// Gives metrics their steps.
    progress: RunProgress,
    /// The sequence of the last exported fact.
    cursor: u64,
}

impl<S: RunExporter, F: FnMut(&RunId, u64, usize)> ExportLoop<'_, S, F> {
    /// Skips a run whose spec is no longer in the log.
    async fn export_batch(
        &mut self,
        run: &RunId,
        records: Vec<Record>,
    ) -> Result<(), ExporterError> {
        let Some(last) = records.last().map(|record| record.sequence) else { return Ok(()) };
        if !self.runs.contains_key(run) {
            // Without its first fact, the optimizer steps of a run are unknown.
            if !records.first().is_some_and(|it| matches!(it.fact.body, FactBody::Spec(_))) {
                tracing::warn!(%run, "its spec is no longer in the log: it is left out");
                return Ok(());
            }
            let Some(cursor) = self.with_retries(async |sink| sink.read_cursor(run).await).await?
            else {
                return Ok(());
            };
            self.runs.insert(run.clone(), ExportState { progress: RunProgress::default(), cursor });
        }
        let Some(known) = self.runs.get_mut(run) else { return Ok(()) };
        let updates =
            records.into_iter().map(|record| known.progress.next_update(Arc::new(record)));
        let cursor = known.cursor;
        let updates: Vec<RunUpdate> = updates.collect();
        let news: Vec<RunUpdate> =
            updates.into_iter().filter(|update| update.record.sequence > cursor).collect();
        if news.is_empty() {
            return Ok(());
        }
        if self.with_retries(async |sink| sink.write_updates(run, &news).await).await?.is_some() {
            self.runs.entry(run.clone()).and_modify(|known| known.cursor = last);
            (self.on_progress)(run, last, news.len());
        }
        Ok(())
    }

    /// Repeats a request while it fails with a transient error. Returns `None` when the export was
    /// stopped.
    async fn with_retries<T>(
        &mut self,
        mut ask: impl AsyncFnMut(&mut S) -> Result<T, ExporterError>,
    ) -> Result<Option<T>, ExporterError> {
        let (mut wait, mut reminded) = (FIRST_BACKOFF, None::<Instant>);
        loop {
            let asked = self.stop.run_until_cancelled(ask(&mut self.exporter)).await;
            let error = match asked {
                None => return Ok(None),
                Some(Ok(done)) => return Ok(Some(done)),
                Some(Err(error @ ExporterError::Permanent { .. })) => return Err(error),
                Some(Err(error @ ExporterError::Transient { .. })) => error,
            };
            if reminded.is_none_or(|at| at.elapsed() > WARN_INTERVAL) {
                reminded = Some(Instant::now());
                tracing::warn!(%error, "the tracker rejected it; retrying");
            }
            if self.stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return Ok(None);
            }
            wait = (wait * 2).min(LONGEST_BACKOFF);
        }
    }
}
