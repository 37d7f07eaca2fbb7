//! Moving what done cycles were made of from the log into the store.
//!
//! Follows the small facts by itself and works beside the coordinator's loop, one cycle at a
//! time. Two that do it at once write the same bytes, and the log takes one fact.

mod files;
mod lines;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
    time::Duration,
};

use anyhow::{Context, bail};
use bus::{Bus, Followed, ReadError, Usage};
use futures::StreamExt;
use serde_json::json;
use store::{About, Store, TreePlace};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use wire::{Body, Fact, JobId, Place, Record, RunId, Subject, v1};

use files::Files;
use lines::Kept;

/// Records read ahead of the disk; each is at most a job's samples.
const READ_AHEAD: usize = 16;

/// Largest dataset whose kept samples are marked.
const DATASET_BYTES_MAX: u64 = 1 << 30;

/// Between tries of what the store or the bus refused; doubled up to the cap.
const RETRY_FIRST: Duration = Duration::from_secs(2);
const RETRY_CAP: Duration = Duration::from_secs(300);

/// Between looks at how full the log is.
const MEASURE_EVERY: Duration = Duration::from_secs(60);

/// What the log keeps of each run's done cycles, the newest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    All,
    Cycles(u32),
}

impl FromStr for Keep {
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

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => write!(f, "all"),
            Self::Cycles(number) => write!(f, "{number}"),
        }
    }
}

/// Cycles that are done, as far as they were dealt with.
#[derive(Debug, Default)]
struct Runs(BTreeMap<RunId, Cycles>);

#[derive(Debug, Default)]
struct Cycles {
    /// By number, where the log has their end.
    done: BTreeMap<u32, u64>,
    archived: BTreeSet<u32>,
    purged: BTreeSet<u32>,
    /// After a failure: until when, and for how long, nothing is tried.
    rest: Option<(Instant, Duration)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Task {
    Archive { run: RunId, cycle: u32, done: u64 },
    Purge { run: RunId, cycle: u32, done: u64 },
}

impl Runs {
    fn note(&mut self, record: &Record) {
        let Subject { run, place } = &record.fact.subject;
        match (place, &record.fact.body) {
            // A supervised run has no samples to archive.
            (Place::Spec, Body::Spec(v1::Spec { kind: Some(v1::spec::Kind::Raft(_)), .. })) => {
                self.0.entry(run.clone()).or_default();
            }
            (Place::CycleDone { cycle }, _) => {
                if let Some(cycles) = self.0.get_mut(run) {
                    cycles.done.insert(*cycle, record.sequence);
                }
            }
            (Place::Archived { cycle }, _) => {
                if let Some(cycles) = self.0.get_mut(run) {
                    cycles.archived.insert(*cycle);
                }
            }
            _ => {}
        }
    }

    /// What to do next; the oldest cycles first. A run in trouble does not hold up the others.
    fn task(&self, keep: Keep, now: Instant) -> Option<Task> {
        let due = |cycles: &Cycles| cycles.rest.is_none_or(|(until, _)| until <= now);
        let mut runs = self.0.iter().filter(|(_, cycles)| due(cycles));
        runs.find_map(|(run, cycles)| cycles.task(run, keep))
    }

    fn tried(&mut self, run: &RunId, done: bool, now: Instant) {
        let Some(cycles) = self.0.get_mut(run) else { return };
        let pause = cycles.rest.map_or(RETRY_FIRST, |(_, pause)| (pause * 2).min(RETRY_CAP));
        cycles.rest = (!done).then_some((now + pause, pause));
    }

    fn purged(&mut self, run: &RunId, cycle: u32) {
        if let Some(cycles) = self.0.get_mut(run) {
            cycles.purged.insert(cycle);
        }
    }
}

impl Cycles {
    fn task(&self, run: &RunId, keep: Keep) -> Option<Task> {
        let kept = match keep {
            Keep::All => usize::MAX,
            Keep::Cycles(number) => usize::try_from(number).unwrap_or(usize::MAX),
        };
        let let_go = self.done.len().saturating_sub(kept);
        let due = |(place, (cycle, done)): (usize, (&u32, &u64))| {
            let (run, cycle, done) = (run.clone(), *cycle, *done);
            if !self.archived.contains(&cycle) {
                Some(Task::Archive { run, cycle, done })
            } else if place < let_go && !self.purged.contains(&cycle) {
                Some(Task::Purge { run, cycle, done })
            } else {
                None
            }
        };
        self.done.iter().enumerate().find_map(due)
    }
}

/// Archives and lets go for as long as this process leads; until dropped.
pub(crate) async fn run(bus: Bus, store: Store, keep: Keep, mut leads: watch::Receiver<bool>) {
    let kinds = ["spec", "cycle.*.done", "cycle.*.archived"];
    let filters = kinds.map(|kind| format!("flotilla.*.{kind}")).to_vec();
    let mut facts = bus.follow(filters, 0);
    let mut runs = Runs::default();
    let mut caught_up = false;
    let mut look = tokio::time::interval(RETRY_FIRST);
    let mut measure = tokio::time::interval(MEASURE_EVERY);
    loop {
        let now = Instant::now();
        let task = if caught_up && *leads.borrow() { runs.task(keep, now) } else { None };
        let Some(task) = task else {
            tokio::select! {
                Some(fact) = facts.next() => take(&mut runs, &mut caught_up, fact),
                changed = leads.changed() => if changed.is_err() { return },
                _ = look.tick() => {}
                _ = measure.tick() => warn_when_filling(&bus).await,
            }
            continue;
        };
        let done = perform(&bus, &store, &task, &mut runs).await;
        if let Err(error) = &done {
            let error = format!("{error:#}");
            tracing::warn!(?task, error, "archiving; it is tried again later");
        }
        let (Task::Archive { run, .. } | Task::Purge { run, .. }) = &task;
        runs.tried(run, done.is_ok(), Instant::now());
    }
}

async fn warn_when_filling(bus: &Bus) {
    // Following the log says so when it cannot be read.
    let Ok(Usage { bytes, limit: Some(limit), .. }) = bus.usage().await else { return };
    if is_filling(bytes, limit) {
        tracing::warn!(
            bytes,
            limit,
            "the log is filling; raise --log-max-gib or keep fewer cycles with --keep-cycles"
        );
    }
}

/// At four fifths there is still time to do something.
fn is_filling(bytes: u64, limit: u64) -> bool {
    bytes / 4 >= limit / 5
}

fn take(runs: &mut Runs, caught_up: &mut bool, fact: Result<Followed, ReadError>) {
    match fact {
        Ok(Followed::Record(record)) => runs.note(&record),
        Ok(Followed::CaughtUp) => *caught_up = true,
        // The coordinator's own loop says so.
        Ok(Followed::Unreadable { .. }) | Err(_) => {}
    }
}

async fn perform(bus: &Bus, store: &Store, task: &Task, runs: &mut Runs) -> anyhow::Result<()> {
    match task {
        Task::Archive { run, cycle, done } => {
            let archive = Archive { bus, store, run, cycle: *cycle, done: *done };
            let record = archive.commit().await?;
            runs.note(&record);
        }
        Task::Purge { run, cycle, done } => {
            let purged = bus.purge_cycle(run, *cycle, *done).await?;
            runs.purged(run, *cycle);
            if purged > 0 {
                tracing::info!(%run, cycle, purged, "let go of an archived cycle's facts");
            }
        }
    }
    Ok(())
}

/// One cycle to be archived: its facts up to its end at `done`.
struct Archive<'a> {
    bus: &'a Bus,
    store: &'a Store,
    run: &'a RunId,
    cycle: u32,
    done: u64,
}

impl Archive<'_> {
    /// Files first, then the fact. The answer is the fact as it stands in the log.
    async fn commit(&self) -> anyhow::Result<Record> {
        let subject = Subject::new(self.run, Place::Archived { cycle: self.cycle });
        if let Some(there) = self.bus.get(&subject.to_string()).await? {
            return Ok(there);
        }
        let directory = tempfile::tempdir().context("make room for an archive")?;
        let records = self.write(directory.path()).await?;
        let about = [("content", json!("archive")), ("cycle", json!(self.cycle))];
        let about: About = about.map(|(key, value)| (key.to_owned(), value)).into();
        let place =
            TreePlace::new(&format!("runs/{}/cycles", self.run), &format!("c{}", self.cycle))?;
        let tree = self.store.publish_tree(directory.path(), &place, about).await?;
        let cycle = self.cycle;
        let body = Body::Archived(v1::Archived { cycle, tree: Some(tree), records });
        let fact = Fact { subject: subject.clone(), body };
        self.bus.publish(&fact).await?;
        tracing::info!(%subject, records, "archived");
        let there = self.bus.get(&subject.to_string()).await?;
        there.context("what was written to the log is not there")
    }

    /// Compression is not for the runtime's own threads.
    async fn write(&self, directory: &std::path::Path) -> anyhow::Result<u64> {
        let mut files = Files::create(directory, self.kept().await?, self.redrawn().await?)?;
        let (send, mut records) = mpsc::channel::<Record>(READ_AHEAD);
        let writing = tokio::task::spawn_blocking(move || {
            while let Some(record) = records.blocking_recv() {
                files.write(record)?;
            }
            files.finish()
        });
        let read = self.read(send).await;
        let written = writing.await.context("the archive's writer panicked")?;
        read?;
        written.context("write an archive")
    }

    async fn read(&self, send: mpsc::Sender<Record>) -> anyhow::Result<()> {
        let mut facts = std::pin::pin!(self.bus.follow(self.filters(), 0));
        while let Some(followed) = facts.next().await {
            match followed? {
                Followed::Record(record) if record.sequence > self.done => break,
                Followed::Record(record) => {
                    // The writer ends only by an error, which is then told.
                    if send.send(record).await.is_err() {
                        break;
                    }
                }
                Followed::CaughtUp => break,
                Followed::Unreadable { sequence, subject, .. } if sequence <= self.done => {
                    bail!("entry {sequence} on {subject} cannot be read, so it is kept (B113)");
                }
                Followed::Unreadable { .. } => {}
            }
        }
        Ok(())
    }

    fn filters(&self) -> Vec<String> {
        let Self { run, cycle, .. } = self;
        let small = [
            format!("flotilla.{run}.cycle.{cycle}.plan"),
            format!("flotilla.{run}.cycle.{cycle}.done"),
            format!("flotilla.{run}.selection.{cycle}"),
            format!("flotilla.{run}.order.train.*.{cycle}.*"),
            format!("flotilla.{run}.checkpoint.{cycle}.*"),
            format!("flotilla.{run}.eval.{cycle}.*.*"),
        ];
        Place::bulky_filters(run, *cycle).into_iter().chain(small).collect()
    }

    /// Jobs whose samples were of something else than was ordered.
    async fn redrawn(&self) -> anyhow::Result<BTreeSet<JobId>> {
        let filter = format!("flotilla.{}.quarantine.*.*", self.run);
        let mut facts = std::pin::pin!(self.bus.follow(vec![filter], 0));
        let mut jobs = BTreeSet::new();
        while let Some(followed) = facts.next().await {
            let record = match followed? {
                Followed::Record(record) if record.sequence <= self.done => record,
                Followed::Record(_) | Followed::CaughtUp => break,
                Followed::Unreadable { .. } => continue,
            };
            if let Body::Quarantine(quarantine) = record.fact.body {
                let ours = quarantine.jobs_of(self.cycle);
                jobs.extend(ours.filter_map(|job| job.parse::<JobId>().ok()));
            }
        }
        Ok(jobs)
    }

    async fn kept(&self) -> anyhow::Result<Kept> {
        let subject = Subject::new(self.run, Place::Selection { cycle: self.cycle });
        let selection = self.bus.get(&subject.to_string()).await?;
        let Some(Body::Selected(selected)) = selection.map(|record| record.fact.body) else {
            return Ok(Kept::new());
        };
        let Some(dataset) = selected.dataset.filter(|_| selected.kept > 0) else {
            return Ok(Kept::new());
        };
        let bytes = self.store.get_blob(&dataset, DATASET_BYTES_MAX).await?;
        lines::kept(&bytes).context("read what was selected")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> RunId {
        RunId::new("r1").unwrap()
    }

    fn cycles(done: &[u32], archived: &[u32]) -> Cycles {
        Cycles {
            done: done.iter().map(|cycle| (*cycle, u64::from(*cycle) * 10)).collect(),
            archived: archived.iter().copied().collect(),
            ..Cycles::default()
        }
    }

    #[test]
    fn a_done_cycle_is_archived_before_anything_is_let_go() {
        let task = |cycles: Cycles, keep| cycles.task(&run(), keep);
        let archive =
            |cycle| Some(Task::Archive { run: run(), cycle, done: u64::from(cycle) * 10 });
        let purge = |cycle| Some(Task::Purge { run: run(), cycle, done: u64::from(cycle) * 10 });
        assert_eq!(task(cycles(&[0, 1], &[]), Keep::Cycles(0)), archive(0));
        assert_eq!(task(cycles(&[0, 1], &[0]), Keep::Cycles(0)), purge(0));
        assert_eq!(task(cycles(&[0, 1], &[0]), Keep::Cycles(1)), purge(0));
        assert_eq!(task(cycles(&[0, 1], &[0]), Keep::Cycles(2)), archive(1));
        assert_eq!(task(cycles(&[0, 1, 2], &[0, 1, 2]), Keep::Cycles(2)), purge(0));
        assert_eq!(task(cycles(&[0, 1], &[0, 1]), Keep::Cycles(2)), None);
        assert_eq!(task(cycles(&[0, 1, 2], &[0, 1, 2]), Keep::All), None);
    }

    #[test]
    fn a_run_in_trouble_rests_ever_longer_and_holds_up_nobody() {
        let mut runs = Runs::default();
        let (a, b) = (RunId::new("a").unwrap(), RunId::new("b").unwrap());
        runs.0.insert(a.clone(), cycles(&[0], &[]));
        runs.0.insert(b.clone(), cycles(&[0], &[]));
        let now = Instant::now();
        let next = |runs: &Runs, at| match runs.task(Keep::All, at) {
            Some(Task::Archive { run, .. }) => run,
            other => panic!("{other:?}"),
        };
        assert_eq!(next(&runs, now), a);
        runs.tried(&a, false, now);
        assert_eq!(next(&runs, now), b);
        assert_eq!(next(&runs, now + RETRY_FIRST), a);
        (0..20).for_each(|_| runs.tried(&a, false, now));
        assert_eq!(next(&runs, now + RETRY_CAP / 2), b);
        assert_eq!(next(&runs, now + RETRY_CAP), a);
    }

    #[test]
    fn a_log_is_filling_from_four_fifths_on() {
        assert!(!is_filling(79 << 20, 100 << 20));
        assert!(is_filling(80 << 20, 100 << 20));
    }

    #[test]
    fn what_is_kept_is_a_number_or_all() {
        assert_eq!("all".parse(), Ok(Keep::All));
        assert_eq!("0".parse(), Ok(Keep::Cycles(0)));
        assert!("-1".parse::<Keep>().is_err());
        assert_eq!(Keep::Cycles(3).to_string().parse(), Ok(Keep::Cycles(3)));
    }
}
