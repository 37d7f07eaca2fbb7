//! Publishes the checkpoints that a scanner has staged: files first, then the fact, in step order.
//!
//! The process may end at any time: staged checkpoints stay staged, published ones are not
//! published again, and a begun run is found again.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use agent::TaskContext;
use anyhow::Context;
use bus::{Bus, LogEvent};
use futures::{StreamExt, future::BoxFuture};
use serde_json::json;
use store::{FileCache, Store, TreeMetadata, TreePlace};
use wire::{AgentId, Fact, FactBody, FactKey, RunId, Subject, v1};

use crate::{
    base_model,
    checkpoint_files::CheckpointContent,
    checkpoint_scanner::{CheckpointScanner, QuietSettings, WatchRecord},
    directory_events::DirectoryEvents,
    file_probes,
    staging::{DirectoryTakenError, StagedCheckpoint},
};

/// Without file-system events.
const SCAN_INTERVAL: Duration = Duration::from_secs(2);

/// A save causes many events; one scan covers all within this time.
const EVENT_GATHER_TIME: Duration = Duration::from_millis(100);

/// While a staged checkpoint waits for its quiet period.
const STAGED_SCAN_INTERVAL: Duration = Duration::from_millis(250);

/// Between two checks if the run has ended.
const RUN_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// After a transient error.
const ERROR_PAUSE: Duration = Duration::from_secs(5);

/// For a save by one process.
const QUIET_PERIOD: Duration = Duration::from_secs(2);

/// For a save by several processes, or on a network file system.
const REMOTE_QUIET_PERIOD: Duration = Duration::from_secs(10);

/// The configuration of a watcher.
#[derive(Debug, Clone)]
pub struct Config {
    /// The directory in which the trainer saves.
    pub directory: PathBuf,
    /// The staging directory if `directory` is not writable.
    pub fallback: PathBuf,
    /// Named in the checkpoints' facts.
    pub agent: AgentId,
    pub name: String,
    /// True if the user named the base of the adapters.
    pub base_given: bool,
    /// The last step, if training is to end before its planned end.
    pub until: Option<u32>,
}

/// The properties of a run that is to begin.
#[derive(Debug, Clone)]
pub struct NewRunInfo {
    /// Since 1970, when its first checkpoint was found. The same run always has the same time, so
    /// that beginning is idempotent.
    pub begun_at: Duration,
    pub base: Option<PathBuf>,
}

/// A callback that writes a run's spec, or finds the run if the spec was written before.
pub type BeginRun =
    Arc<dyn Fn(NewRunInfo) -> BoxFuture<'static, anyhow::Result<RunId>> + Send + Sync>;

/// A run of an external training, as the log has it.
struct AdoptedRun {
    id: RunId,
    /// `None` if the run consists of whole models.
    base: Option<v1::Tree>,
    steps: BTreeSet<u32>,
    /// The planned end in steps, 0 if unknown.
    planned_steps: u32,
    done: Option<v1::Done>,
    checked_at: Option<Instant>,
}

/// The publisher of one watched directory. Each round of its loop does these steps:
///
/// 1. Scan the directory and stage complete checkpoints.
/// 2. For each staged checkpoint after its quiet period: begin the run if necessary, upload the
///    files, check that they did not change meanwhile, and write the fact.
/// 3. Check if the run has ended.
/// 4. Report status, then wait for a file-system event or the next scan.
///
/// A transient error is reported in the status and retried after 5 s. Another agent on the same
/// directory ends the watch.
struct CheckpointPublisher {
    config: Config,
    bus: Bus,
    store: Store,
    cache: FileCache,
    begin: BeginRun,
    scanner: CheckpointScanner,
    run: Option<AdoptedRun>,
}

/// Publishes checkpoints until the run has ended, and returns its result; `None` if the agent is
/// drained or stopped before. Fails if another agent watches the directory.
pub async fn watch_checkpoints(
    config: Config,
    bus: Bus,
    (store, cache): (Store, FileCache),
    begin: BeginRun,
    side: TaskContext,
) -> anyhow::Result<Option<v1::Done>> {
    let elsewhere = is_elsewhere(&config.directory);
    let policy = QuietSettings {
        quiet_period: QUIET_PERIOD,
        remote_quiet_period: REMOTE_QUIET_PERIOD,
        is_remote: elsewhere,
    };
    let scanner = CheckpointScanner::open_directory(&config.directory, &config.fallback, policy)?;
    let mut hints = DirectoryEvents::new(elsewhere);
    let directory = config.directory.display().to_string();
    tracing::info!(directory, elsewhere, "watching");
    let drain = side.drain.clone();
    let mut watcher = CheckpointPublisher { config, bus, store, cache, begin, scanner, run: None };
    drain.run_until_cancelled(watcher.restore_run()).await;
    loop {
        let Some(outcome) = drain.run_until_cancelled(watcher.run_round(&mut hints)).await else {
            return Ok(None);
        };
        let (trouble, pause) = match outcome {
            Ok(()) if watcher.scanner.has_staged() => {
                (watcher.scanner.permanent_trouble(), STAGED_SCAN_INTERVAL)
            }
            Ok(()) => (watcher.scanner.permanent_trouble(), SCAN_INTERVAL),
            Err(error) if error.is::<DirectoryTakenError>() => return Err(error),
            Err(error) => (Some(format!("{error:#}")), ERROR_PAUSE),
        };
        side.status.report_trouble(trouble);
        watcher.report_status(&side);
        if let Some(done) = watcher.run.as_mut().and_then(|run| run.done.take()) {
            return Ok(Some(done));
        }
        tokio::select! {
            () = drain.cancelled() => return Ok(None),
            () = hints.wait_changed() => tokio::time::sleep(EVENT_GATHER_TIME).await,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

impl CheckpointPublisher {
    /// Finds the run that an earlier agent began. If it has ended, belongs to another fleet or has
    /// another name, the next checkpoint begins a new run.
    async fn restore_run(&mut self) {
        let WatchRecord { run: Some(id), name, .. } = self.scanner.watch_record().clone() else {
            return;
        };
        while let Err(error) = self.try_restore(&id, &name).await {
            tracing::warn!(
                error = format!("{error:#}"),
                "finding the run of this directory \
                                                          failed; retrying"
            );
            tokio::time::sleep(ERROR_PAUSE).await;
        }
    }

    async fn try_restore(&mut self, id: &str, name: &str) -> anyhow::Result<()> {
        let known = match RunId::new(id) {
            Ok(id) if name == self.config.name => self.read_run(id).await?,
            _ => None,
        };
        match known {
            Some(run) if run.done.is_none() => {
                tracing::info!(run = %run.id, checkpoints = run.steps.len(), "resuming the run");
                self.run = Some(run);
                Ok(())
            }
            // Saves already processed for the ended run must not begin another run.
            Some(over) => {
                tracing::info!(run = %over.id, "the run is over; the next new checkpoint begins \
                                                another");
                self.scanner.update_record(|memory| {
                    *memory = WatchRecord {
                        seen: std::mem::take(&mut memory.seen),
                        ..WatchRecord::default()
                    };
                })
            }
            None => self.scanner.update_record(|memory| *memory = WatchRecord::default()),
        }
    }

    /// Returns `None` if the log has no spec of the run.
    async fn read_run(&self, id: RunId) -> anyhow::Result<Option<AdoptedRun>> {
        let filters =
            ["watched", "checkpoint.watched.*", "done"].map(|kind| format!("flotilla.{id}.{kind}"));
        let mut facts = self.bus.follow_facts(filters.to_vec(), 0);
        let mut spec = None;
        let mut run = AdoptedRun {
            id,
            base: None,
            steps: BTreeSet::new(),
            planned_steps: 0,
            done: None,
            checked_at: None,
        };
        while let Some(followed) = facts.next().await {
            match followed? {
                LogEvent::CaughtUp => break,
                LogEvent::Unreadable { .. } => {}
                LogEvent::Record(record) => match record.fact.body {
                    FactBody::Spec(found) => spec = Some(found),
                    FactBody::Checkpoint(checkpoint) => {
                        run.planned_steps = checkpoint.steps;
                        run.steps.insert(checkpoint.step);
                    }
                    FactBody::Done(done) => run.done = Some(done),
                    _ => {}
                },
            }
        }
        let Some(spec) = spec else { return Ok(None) };
        run.base = spec.base.and_then(|base| base.tree);
        Ok(Some(run))
    }

    fn report_status(&self, side: &TaskContext) {
        let Some(run) = &self.run else { return };
        let gone = match self.scanner.rotated_count() {
            0 => String::new(),
            count => format!(", {count} rotated before publish"),
        };
        let note = format!("{} published{gone}", run.steps.len());
        let last = run.steps.last().copied().unwrap_or(0);
        side.status.report_progress(run.id.as_str(), last, run.planned_steps, &note);
    }

    async fn run_round(&mut self, hints: &mut DirectoryEvents) -> anyhow::Result<()> {
        let directory = self.config.directory.clone();
        let scanner = &mut self.scanner;
        tokio::task::block_in_place(|| {
            hints.watch_directories(
                &directory,
                &file_probes::list_checkpoints(&directory).unwrap_or_default(),
            );
            scanner.scan_directory(Instant::now())
        })?;
        while let Some(held) = self.scanner.next_checkpoint(Instant::now()) {
            let step = held.step;
            self.publish_checkpoint(held)
                .await
                .with_context(|| format!("publish checkpoint-{step}"))?;
        }
        self.check_run_end().await
    }

    /// Reads the run's result, at most once per second.
    async fn check_run_end(&mut self) -> anyhow::Result<()> {
        let recent = |asked: Instant| asked.elapsed() < RUN_CHECK_INTERVAL;
        let Some(run) = self.run.as_mut().filter(|run| !run.checked_at.is_some_and(recent)) else {
            return Ok(());
        };
        run.checked_at = Some(Instant::now());
        let done = self.bus.get_fact(&Subject::new(&run.id, FactKey::Done).to_string()).await?;
        run.done = done.and_then(|record| match record.fact.body {
            FactBody::Done(done) => Some(done),
            _ => None,
        });
        Ok(())
    }

    /// Publishes one checkpoint. It stays staged if the run has ended, and is released if it
    /// changed while it was uploaded.
    async fn publish_checkpoint(&mut self, held: StagedCheckpoint) -> anyhow::Result<()> {
        self.check_run_end().await?;
        if self.run.as_ref().is_some_and(|run| run.done.is_some()) {
            // It stays staged, as the first checkpoint of the next agent.
            return Ok(());
        }
        if self.run.is_none() {
            self.begin_run(&held).await?;
        }
        let Some(run) = &self.run else { return Ok(()) };
        if let Some(why) = self.mismatch_reason(run, &held) {
            tracing::warn!(step = held.step, why, "a checkpoint is not published");
            return self.scanner.finish_checkpoint(&held);
        }
        let base = run.base.clone();
        let about = |tree: &v1::Tree| tree.manifest.clone();
        let files = self.scanner.prepare_files(&held, base.as_ref().map(about).as_deref())?;
        if run.steps.contains(&held.step) {
            self.warn_if_different(&run.id, &held, &files).await?;
            return self.scanner.finish_checkpoint(&held);
        }
        if !self.scanner.is_unchanged(&held) {
            return self.scanner.release_step(held.step);
        }
        let mut checkpoint = self.build_fact(run, &held);
        let place = TreePlace::for_checkpoint(&run.id, 0, held.step);
        let about = tree_metadata(&checkpoint);
        let tree = self.cache.publish_tree(&self.store, &files, &place, about).await?;
        // The files were hashed meanwhile, so check now: after a change they are another
        // checkpoint.
        if !self.scanner.is_unchanged(&held) {
            tracing::info!(step = held.step, "changed while it was published; checking again");
            return self.scanner.release_step(held.step);
        }
        checkpoint.tree = Some(tree);
        let subject = Subject::new(&run.id, FactKey::WatchedCheckpoint { step: held.step });
        let fact = Fact { subject, body: FactBody::Checkpoint(checkpoint.clone()) };
        self.bus.publish_fact(&fact).await?;
        let v1::Checkpoint { step, steps, loss, r#final, .. } = checkpoint;
        tracing::info!(run = %run.id, step, steps, loss, last = r#final, "published");
        if let Some(run) = &mut self.run {
            run.planned_steps = steps;
            run.steps.insert(held.step);
        }
        self.scanner.finish_checkpoint(&held)
    }

    /// Begins the run, now that its first checkpoint shows the base model.
    async fn begin_run(&mut self, held: &StagedCheckpoint) -> anyhow::Result<()> {
        let needs_base = held.content == CheckpointContent::Adapter && !self.config.base_given;
        let base = match (needs_base, &held.base_name) {
            (false, _) => None,
            (true, Some(name)) => Some(base_model::find_base(name, &self.config.directory)?),
            (true, None) => {
                anyhow::bail!(
                    "the adapter names no base; pass the base's directory with --watch-base (R116)"
                )
            }
        };
        let now = wire::clock::unix_time();
        let name = self.config.name.clone();
        self.scanner.update_record(|memory| {
            memory.name = name;
            memory.begun_ns.get_or_insert(u64::try_from(now.as_nanos()).unwrap_or(0));
            memory.base_name.clone_from(&held.base_name);
        })?;
        let at = Duration::from_nanos(self.scanner.watch_record().begun_ns.unwrap_or_default());
        let id = (self.begin)(NewRunInfo { begun_at: at, base }).await?;
        self.scanner.update_record(|memory| memory.run = Some(id.to_string()))?;
        let run = self.read_run(id.clone()).await?;
        self.run = Some(run.with_context(|| format!("the log has lost the spec of {id}"))?);
        tracing::info!(run = %id, directory = %self.config.directory.display(), "began");
        Ok(())
    }

    /// Returns why a checkpoint does not belong to the run.
    fn mismatch_reason(&self, run: &AdoptedRun, held: &StagedCheckpoint) -> Option<String> {
        if held.content == CheckpointContent::Model {
            return None;
        }
        if run.base.is_none() {
            return Some(format!("it is an adapter, but {} began with full models", run.id));
        }
        let first = &self.scanner.watch_record().base_name;
        let differs = !self.config.base_given && held.base_name != *first;
        differs.then(|| {
            let name = |name: &Option<String>| name.clone().unwrap_or_else(|| "none".into());
            let (own, first) = (name(&held.base_name), name(first));
            format!("it names the base {own:?}, {} began with {first:?}", run.id)
        })
    }

    /// Leaves out the location of the files.
    fn build_fact(&self, run: &AdoptedRun, held: &StagedCheckpoint) -> v1::Checkpoint {
        let state = self.scanner.trainer_state(held);
        let before = run.steps.range(..held.step).next_back().copied().unwrap_or(0);
        let figures = state.as_ref().map(|state| state.figures_since(before)).unwrap_or_default();
        let planned = state.as_ref().and_then(|state| state.planned_steps());
        let (steps, last) = training_extent(held.step, planned, self.config.until);
        let content = match held.content {
            CheckpointContent::Adapter => v1::checkpoint::Content::Adapter,
            CheckpointContent::Model => v1::checkpoint::Content::Model,
        };
        v1::Checkpoint {
            run: run.id.to_string(),
            cycle: 0,
            step: held.step,
            steps,
            r#final: last,
            content: content.into(),
            base: run.base.clone().filter(|_| held.content == CheckpointContent::Adapter),
            parent: run.base.clone(),
            loss: figures.loss.unwrap_or(f64::NAN),
            learning_rate: figures.learning_rate,
            tokens: figures.tokens,
            agent: self.config.agent.to_string(),
            ..Default::default()
        }
    }

    /// Warns if a published step was saved again with other bytes. The first save counts.
    async fn warn_if_different(
        &self,
        run: &RunId,
        held: &StagedCheckpoint,
        files: &Path,
    ) -> anyhow::Result<()> {
        let place = FactKey::WatchedCheckpoint { step: held.step };
        let record = self.bus.get_fact(&Subject::new(run, place).to_string()).await?;
        let Some(FactBody::Checkpoint(checkpoint)) = record.map(|record| record.fact.body) else {
            return Ok(());
        };
        let tree = checkpoint.tree.context("its fact names no tree")?;
        let manifest = self.store.read_manifest(&tree).await?;
        for file in &manifest.files {
            let path = files.join(file.path.as_str());
            let digest = tokio::task::spawn_blocking(move || hash_file(&path)).await?;
            if !digest.is_ok_and(|digest| digest == file.digest) {
                let file = file.path.as_str();
                tracing::warn!(
                    %run, step = held.step, file,
                    "saved again with different contents; the run keeps the first version. If the \
                     training was restarted, cancel this run and restart the agent"
                );
                break;
            }
        }
        Ok(())
    }
}

/// Returns the step at which training ends (0 if unknown), and true if it has reached it.
fn training_extent(step: u32, planned: Option<u32>, until: Option<u32>) -> (u32, bool) {
    let steps = match (planned, until) {
        (Some(planned), Some(until)) => planned.min(until),
        (known, None) | (None, known) => known.unwrap_or(0),
    };
    let last = steps > 0 && step >= steps;
    (if last { step } else { steps }, last)
}

/// Returns the BLAKE3 digest.
fn hash_file(path: &Path) -> std::io::Result<wire::Digest> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(std::fs::File::open(path)?)?;
    Ok(hasher.finalize().into())
}

/// Returns metadata that depends on neither the agent nor the run.
fn tree_metadata(checkpoint: &v1::Checkpoint) -> TreeMetadata {
    let v1::Checkpoint { cycle, step, steps, parent, .. } = checkpoint;
    let adapter = checkpoint.content() == v1::checkpoint::Content::Adapter;
    let entries = [
        ("content", json!(if adapter { "adapter" } else { "model" })),
        ("base", json!(parent.as_ref().map(|tree| tree.manifest.clone()))),
        ("cycle", json!(cycle)),
        ("step", json!(step)),
        ("steps", json!(steps)),
    ];
    entries.map(|(key, value)| (key.to_owned(), value)).into()
}

/// Returns true for a network file system, whose events are not delivered here and whose times are
/// coarse.
#[cfg(target_os = "linux")]
fn is_elsewhere(directory: &Path) -> bool {
    const NFS: i64 = 0x6969;
    const SMB: i64 = 0x517b;
    const CIFS: i64 = 0xff53_4d42;
    const SMB2: i64 = 0xfe53_4d42;
    const FUSE: i64 = 0x6573_5546;
    const CEPH: i64 = 0x00c3_6400;
    const NINE_P: i64 = 0x0102_1997;
    // A missing directory will be created on its parent's file system.
    let there = directory.ancestors().find(|place| place.exists());
    let kind = there.and_then(|place| rustix::fs::statfs(place).ok()).map(|found| found.f_type);
    // The type has 32 bits, which some systems sign-extend.
    kind.is_some_and(|kind| {
        [NFS, SMB, CIFS, SMB2, FUSE, CEPH, NINE_P].contains(&(kind & 0xffff_ffff))
    })
}

/// Returns false, as file systems are recognised on Linux only.
#[cfg(not(target_os = "linux"))]
fn is_elsewhere(_directory: &Path) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_training_ends_where_it_planned_to_or_where_the_user_says() {
        assert_eq!(training_extent(10, Some(30), None), (30, false));
        assert_eq!(training_extent(30, Some(30), None), (30, true));
        assert_eq!(training_extent(10, None, None), (0, false), "nobody knows");
        assert_eq!(training_extent(20, Some(30), Some(20)), (20, true));
        assert_eq!(
            training_extent(25, Some(30), Some(20)),
            (25, true),
            "the first behind it is the last"
        );
        assert_eq!(training_extent(20, None, Some(25)), (25, false));
    }
}
