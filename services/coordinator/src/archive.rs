//! Moves the bulky facts of finished cycles from the log to the store, beside the control loop, one
//! cycle at a time. Two archivers of the same cycle write the same bytes, and the log accepts one
//! fact.

mod archive_writer;
mod sample_lines;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
    time::Duration,
};

use anyhow::{Context, bail};
use bus::{Bus, LogEvent, LogUsage, ReadError};
use futures::StreamExt;
use serde_json::json;
use store::{Store, TreeMetadata, TreePlace};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use wire::{Fact, FactBody, FactKey, JobId, Record, RunId, Subject, v1};

use archive_writer::ArchiveWriter;
use sample_lines::{KeptSamples, SampleJoiner};

/// Records read ahead of the disk; each is at most the samples of one job.
const RECORDS_AHEAD_MAX: usize = 16;

/// Dataset whose samples are marked as kept.
const DATASET_BYTES_MAX: u64 = 1 << 30;

/// First backoff after the store or the bus refused a request; doubled up to [`RETRY_BACKOFF_MAX`].
const RETRY_BACKOFF_MIN: Duration = Duration::from_secs(2);
const RETRY_BACKOFF_MAX: Duration = Duration::from_secs(300);

const USAGE_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// The number of finished cycles of each run whose bulky facts stay in the log, newest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CycleRetention {
    /// Nothing is purged.
    All,
    Cycles(u32),
}

impl FromStr for CycleRetention {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            number => {
                number.parse().map(Self::Cycles).map_err(|_| "write a number, or all".to_owned())
            }
        }
    }
}

impl fmt::Display for CycleRetention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => write!(f, "all"),
            Self::Cycles(number) => write!(f, "{number}"),
        }
    }
}

#[derive(Debug, Default)]
struct ArchiveProgress(BTreeMap<RunId, RunArchiveProgress>);

/// The finished cycles of one run, and what was archived and purged.
#[derive(Debug, Default)]
struct RunArchiveProgress {
    /// Finished cycles, each with the log sequence of the fact that ended it.
    finished: BTreeMap<u32, u64>,
    /// Cycles whose facts are in the store.
    archived: BTreeSet<u32>,
    /// Cycles whose bulky facts were removed from the log.
    purged: BTreeSet<u32>,
    /// Time of the next attempt after a failure, and the current backoff.
    backoff: Option<(Instant, Duration)>,
}

/// The next step for one cycle; `done` is the log sequence of the fact that ended it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ArchiveTask {
    Archive { run: RunId, cycle: u32, done: u64 },
    Purge { run: RunId, cycle: u32, done: u64 },
}

impl ArchiveProgress {
    fn apply_fact(&mut self, record: &Record) {
        let Subject { run, key: place } = &record.fact.subject;
        match (place, &record.fact.body) {
            // Only RAFT runs have samples to archive.
            (
                FactKey::Spec,
                FactBody::Spec(v1::Spec { kind: Some(v1::spec::Kind::Raft(_)), .. }),
            ) => {
                self.0.entry(run.clone()).or_default();
            }
            (FactKey::CycleDone { cycle }, _) => {
                if let Some(cycles) = self.0.get_mut(run) {
                    cycles.finished.insert(*cycle, record.sequence);
                }
            }
            (FactKey::Archived { cycle }, _) => {
                if let Some(cycles) = self.0.get_mut(run) {
                    cycles.archived.insert(*cycle);
                }
            }
            _ => {}
        }
    }

    /// Returns the oldest cycles first. A run in backoff does not delay the others.
    fn next_task(&self, keep: CycleRetention, now: Instant) -> Option<ArchiveTask> {
        let due =
            |cycles: &RunArchiveProgress| cycles.backoff.is_none_or(|(until, _)| until <= now);
        let mut runs = self.0.iter().filter(|(_, cycles)| due(cycles));
        runs.find_map(|(run, cycles)| cycles.next_task(run, keep))
    }

    /// Ends the backoff of the run on success, doubles it on failure.
    fn record_attempt(&mut self, run: &RunId, done: bool, now: Instant) {
        let Some(cycles) = self.0.get_mut(run) else { return };
        let pause = cycles
            .backoff
            .map_or(RETRY_BACKOFF_MIN, |(_, pause)| (pause * 2).min(RETRY_BACKOFF_MAX));
        cycles.backoff = (!done).then_some((now + pause, pause));
    }

    fn mark_purged(&mut self, run: &RunId, cycle: u32) {
        if let Some(cycles) = self.0.get_mut(run) {
            cycles.purged.insert(cycle);
        }
    }
}

impl RunArchiveProgress {
    fn next_task(&self, run: &RunId, keep: CycleRetention) -> Option<ArchiveTask> {
        let kept = match keep {
            CycleRetention::All => usize::MAX,
            CycleRetention::Cycles(number) => usize::try_from(number).unwrap_or(usize::MAX),
        };
        let let_go = self.finished.len().saturating_sub(kept);
        let due = |(place, (cycle, done)): (usize, (&u32, &u64))| {
            let (run, cycle, done) = (run.clone(), *cycle, *done);
            if !self.archived.contains(&cycle) {
                Some(ArchiveTask::Archive { run, cycle, done })
            } else if place < let_go && !self.purged.contains(&cycle) {
                Some(ArchiveTask::Purge { run, cycle, done })
            } else {
                None
            }
        };
        self.finished.iter().enumerate().find_map(due)
    }
}

/// Archives and purges while this process is the leader. Runs until dropped.
pub(crate) async fn run(
    bus: Bus,
    store: Store,
    keep: CycleRetention,
    mut leads: watch::Receiver<bool>,
) {
    let kinds = ["spec", "cycle.*.done", "cycle.*.archived"];
    let filters = kinds.map(|kind| format!("flotilla.*.{kind}")).to_vec();
    let mut facts = bus.follow_facts(filters, 0);
    let mut runs = ArchiveProgress::default();
    let mut caught_up = false;
    let mut look = tokio::time::interval(RETRY_BACKOFF_MIN);
    let mut measure = tokio::time::interval(USAGE_CHECK_INTERVAL);
    loop {
        let now = Instant::now();
        let task = if caught_up && *leads.borrow() { runs.next_task(keep, now) } else { None };
        let Some(task) = task else {
            tokio::select! {
                Some(fact) = facts.next() => apply_event(&mut runs, &mut caught_up, fact),
                changed = leads.changed() => if changed.is_err() { return },
                _ = look.tick() => {}
                _ = measure.tick() => warn_when_filling(&bus).await,
            }
            continue;
        };
        let done = perform_task(&bus, &store, &task, &mut runs).await;
        if let Err(error) = &done {
            let error = format!("{error:#}");
            tracing::warn!(?task, error, "archiving failed; retrying later");
        }
        let (ArchiveTask::Archive { run, .. } | ArchiveTask::Purge { run, .. }) = &task;
        runs.record_attempt(run, done.is_ok(), Instant::now());
    }
}

async fn warn_when_filling(bus: &Bus) {
    // If the log is not available, the loop that follows it reports the error.
    let Ok(LogUsage { bytes, limit: Some(limit), .. }) = bus.log_usage().await else { return };
    if is_filling(bytes, limit) {
        tracing::warn!(
            bytes,
            limit,
            "the log is filling; raise --log-max-gib or keep fewer cycles with --keep-cycles"
        );
    }
}

/// Returns true from four fifths of the limit, which leaves time to react.
fn is_filling(bytes: u64, limit: u64) -> bool {
    bytes / 4 >= limit / 5
}

fn apply_event(
    runs: &mut ArchiveProgress,
    caught_up: &mut bool,
    fact: Result<LogEvent, ReadError>,
) {
    match fact {
        Ok(LogEvent::Record(record)) => runs.apply_fact(&record),
        Ok(LogEvent::CaughtUp) => *caught_up = true,
        // The coordinator's control loop reports these.
        Ok(LogEvent::Unreadable { .. }) | Err(_) => {}
    }
}

async fn perform_task(
    bus: &Bus,
    store: &Store,
    task: &ArchiveTask,
    runs: &mut ArchiveProgress,
) -> anyhow::Result<()> {
    match task {
        ArchiveTask::Archive { run, cycle, done } => {
            let archive = CycleArchiver { bus, store, run, cycle: *cycle, done: *done };
            let record = archive.archive_cycle().await?;
            runs.apply_fact(&record);
        }
        ArchiveTask::Purge { run, cycle, done } => {
            let purged = bus.purge_cycle(run, *cycle, *done).await?;
            runs.mark_purged(run, *cycle);
            if purged > 0 {
                tracing::info!(%run, cycle, purged, "purged the facts of an archived cycle");
            }
        }
    }
    Ok(())
}

/// The archiving of one cycle: its facts up to the one that ended it, at sequence `done`.
struct CycleArchiver<'a> {
    bus: &'a Bus,
    store: &'a Store,
    run: &'a RunId,
    cycle: u32,
    done: u64,
}

impl CycleArchiver<'_> {
    /// Publishes the files as a tree, then writes the `archived` fact; returns that fact as it is
    /// in the log. Does nothing if it already exists.
    async fn archive_cycle(&self) -> anyhow::Result<Record> {
        let subject = Subject::new(self.run, FactKey::Archived { cycle: self.cycle });
        if let Some(there) = self.bus.get_fact(&subject.to_string()).await? {
            return Ok(there);
        }
        let directory = tempfile::tempdir().context("free space for an archive")?;
        let records = self.write_files(directory.path()).await?;
        let about = [("content", json!("archive")), ("cycle", json!(self.cycle))];
        let about: TreeMetadata = about.map(|(key, value)| (key.to_owned(), value)).into();
        let place = TreePlace::for_archive(self.run, self.cycle);
        let tree = self.store.publish_tree(directory.path(), &place, about).await?;
        let cycle = self.cycle;
        let body = FactBody::Archived(v1::Archived { cycle, tree: Some(tree), records });
        let fact = Fact { subject: subject.clone(), body };
        self.bus.publish_fact(&fact).await?;
        tracing::info!(%subject, records, "archived");
        let there = self.bus.get_fact(&subject.to_string()).await?;
        there.context("an entry written to the log is missing")
    }

    /// Returns the number of records. Compression runs on a blocking thread, behind a bounded
    /// channel.
    async fn write_files(&self, directory: &std::path::Path) -> anyhow::Result<u64> {
        let (kept, replaced) = (self.load_kept().await?, self.replaced_jobs().await?);
        let joiner = SampleJoiner::new(kept, replaced, self.is_unverified().await?);
        let mut files = ArchiveWriter::create_files(directory, joiner)?;
        let (send, mut records) = mpsc::channel::<Record>(RECORDS_AHEAD_MAX);
        let writing = tokio::task::spawn_blocking(move || {
            while let Some(record) = records.blocking_recv() {
                files.write(record)?;
            }
            files.finish_files()
        });
        let read = self.read_records(send).await;
        let written = writing.await.context("the archive's writer panicked")?;
        read?;
        written.context("write an archive")
    }

    /// Fails at an unreadable entry, because purging it would lose it.
    async fn read_records(&self, send: mpsc::Sender<Record>) -> anyhow::Result<()> {
        let mut facts = std::pin::pin!(self.bus.follow_facts(self.subject_filters(), 0));
        while let Some(followed) = facts.next().await {
            match followed? {
                LogEvent::Record(record) if record.sequence > self.done => break,
                LogEvent::Record(record) => {
                    // The writer has failed; its error is returned by `write_files`.
                    if send.send(record).await.is_err() {
                        break;
                    }
                }
                LogEvent::CaughtUp => break,
                LogEvent::Unreadable { sequence, subject, .. } if sequence <= self.done => {
                    bail!("entry {sequence} on {subject} cannot be read, so it is kept (B113)");
                }
                LogEvent::Unreadable { .. } => {}
            }
        }
        Ok(())
    }

    fn subject_filters(&self) -> Vec<String> {
        let Self { run, cycle, .. } = self;
        let small = [
            format!("flotilla.{run}.cycle.{cycle}.plan"),
            format!("flotilla.{run}.cycle.{cycle}.done"),
            format!("flotilla.{run}.selection.{cycle}"),
            format!("flotilla.{run}.order.train.*.{cycle}.>"),
            format!("flotilla.{run}.slices.{cycle}.*"),
            format!("flotilla.{run}.delta.{cycle}.>"),
            format!("flotilla.{run}.close.{cycle}.*"),
            format!("flotilla.{run}.merge.{cycle}.*"),
            format!("flotilla.{run}.checkpoint.{cycle}.*"),
            format!("flotilla.{run}.eval.{cycle}.*.*"),
        ];
        FactKey::bulky_filters(run, *cycle).into_iter().chain(small).collect()
    }

    async fn replaced_jobs(&self) -> anyhow::Result<BTreeSet<JobId>> {
        let filter = format!("flotilla.{}.quarantine.*.*", self.run);
        let mut facts = std::pin::pin!(self.bus.follow_facts(vec![filter], 0));
        let mut jobs = BTreeSet::new();
        while let Some(followed) = facts.next().await {
            let record = match followed? {
                LogEvent::Record(record) if record.sequence <= self.done => record,
                LogEvent::Record(_) | LogEvent::CaughtUp => break,
                LogEvent::Unreadable { .. } => continue,
            };
            if let FactBody::Quarantine(quarantine) = record.fact.body {
                let ours = quarantine.jobs_in_cycle(self.cycle);
                jobs.extend(ours.filter_map(|job| job.parse::<JobId>().ok()));
            }
        }
        Ok(jobs)
    }

    /// Returns true if the run's training samples have no verifier.
    async fn is_unverified(&self) -> anyhow::Result<bool> {
        let spec = self.bus.find_spec(self.run).await?.map(|record| record.fact.body);
        let Some(FactBody::Spec(v1::Spec { kind: Some(v1::spec::Kind::Raft(raft)), .. })) = spec
        else {
            return Ok(false);
        };
        Ok(raft.verifier.is_none())
    }

    /// Returns the samples that the cycle's selection kept; none without a selection.
    async fn load_kept(&self) -> anyhow::Result<KeptSamples> {
        let subject = Subject::new(self.run, FactKey::Selection { cycle: self.cycle });
        let selection = self.bus.get_fact(&subject.to_string()).await?;
        let Some(FactBody::Selected(selected)) = selection.map(|record| record.fact.body) else {
            return Ok(KeptSamples::new());
        };
        let Some(dataset) = selected.dataset.filter(|_| selected.kept > 0) else {
            return Ok(KeptSamples::new());
        };
        let bytes = self.store.get_blob(&dataset, DATASET_BYTES_MAX).await?;
        // The data of a trial may come from elsewhere.
        Ok(sample_lines::parse_kept(&bytes).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> RunId {
        RunId::new("r1").unwrap()
    }

    fn cycles(done: &[u32], archived: &[u32]) -> RunArchiveProgress {
        RunArchiveProgress {
            finished: done.iter().map(|cycle| (*cycle, u64::from(*cycle) * 10)).collect(),
            archived: archived.iter().copied().collect(),
            ..RunArchiveProgress::default()
        }
    }

    #[test]
    fn a_done_cycle_is_archived_before_anything_is_let_go() {
        let task = |cycles: RunArchiveProgress, keep| cycles.next_task(&run(), keep);
        let archive =
            |cycle| Some(ArchiveTask::Archive { run: run(), cycle, done: u64::from(cycle) * 10 });
        let purge =
            |cycle| Some(ArchiveTask::Purge { run: run(), cycle, done: u64::from(cycle) * 10 });
        assert_eq!(task(cycles(&[0, 1], &[]), CycleRetention::Cycles(0)), archive(0));
        assert_eq!(task(cycles(&[0, 1], &[0]), CycleRetention::Cycles(0)), purge(0));
        assert_eq!(task(cycles(&[0, 1], &[0]), CycleRetention::Cycles(1)), purge(0));
        assert_eq!(task(cycles(&[0, 1], &[0]), CycleRetention::Cycles(2)), archive(1));
        assert_eq!(task(cycles(&[0, 1, 2], &[0, 1, 2]), CycleRetention::Cycles(2)), purge(0));
        assert_eq!(task(cycles(&[0, 1], &[0, 1]), CycleRetention::Cycles(2)), None);
        assert_eq!(task(cycles(&[0, 1, 2], &[0, 1, 2]), CycleRetention::All), None);
    }

    #[test]
    fn a_run_in_trouble_rests_ever_longer_and_holds_up_nobody() {
        let mut runs = ArchiveProgress::default();
        let (a, b) = (RunId::new("a").unwrap(), RunId::new("b").unwrap());
        runs.0.insert(a.clone(), cycles(&[0], &[]));
        runs.0.insert(b.clone(), cycles(&[0], &[]));
        let now = Instant::now();
        let next = |runs: &ArchiveProgress, at| match runs.next_task(CycleRetention::All, at) {
            Some(ArchiveTask::Archive { run, .. }) => run,
            other => panic!("{other:?}"),
        };
        assert_eq!(next(&runs, now), a);
        runs.record_attempt(&a, false, now);
        assert_eq!(next(&runs, now), b);
        assert_eq!(next(&runs, now + RETRY_BACKOFF_MIN), a);
        (0..20).for_each(|_| runs.record_attempt(&a, false, now));
        assert_eq!(next(&runs, now + RETRY_BACKOFF_MAX / 2), b);
        assert_eq!(next(&runs, now + RETRY_BACKOFF_MAX), a);
    }

    #[test]
    fn a_log_is_filling_from_four_fifths_on() {
        assert!(!is_filling(79 << 20, 100 << 20));
        assert!(is_filling(80 << 20, 100 << 20));
    }

    #[test]
    fn what_is_kept_is_a_number_or_all() {
        assert_eq!("all".parse(), Ok(CycleRetention::All));
        assert_eq!("0".parse(), Ok(CycleRetention::Cycles(0)));
        assert!("-1".parse::<CycleRetention>().is_err());
        assert_eq!(CycleRetention::Cycles(3).to_string().parse(), Ok(CycleRetention::Cycles(3)));
    }
}
