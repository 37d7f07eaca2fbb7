//! Scans a directory repeatedly, stages complete checkpoints, and returns them in step order once
//! their files have not changed for a while.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    checkpoint_files::{self, CheckpointContent},
    file_probes,
    readiness::{
        CompleteCheckpoint, DirectoryListing, FileProbes, SaveReadiness, has_multiple_ranks,
        judge_readiness, may_be_complete,
    },
    staging::{StagedCheckpoint, StagingDir, compute_stamp},
    trainer_state::TrainerState,
};

/// Holds the [`WatchRecord`], in the staging directory.
const RECORD_FILE: &str = "watch.json";

/// While the store is unavailable, checkpoints that the trainer removed still occupy disk space
/// here.
const HELD_MAX: usize = 32;

/// Then an incomplete directory is logged.
const INCOMPLETE_WARN_AFTER: Duration = Duration::from_secs(120);

/// A scan within this time after a change may have missed a later change.
const CLOCK_GRANULARITY: Duration = Duration::from_secs(2);

/// The times without changes after which a checkpoint is published.
#[derive(Debug, Clone, Copy)]
pub struct QuietSettings {
    /// After a save by one process.
    pub quiet_period: Duration,
    /// After a save by several processes, or on a network file system.
    pub remote_quiet_period: Duration,
    /// True if the directory is on a network file system.
    pub is_remote: bool,
}

/// The state that survives an agent's restart: the run and the processed saves. The log has the
/// run's published checkpoints.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct WatchRecord {
    pub run: Option<String>,
    pub name: String,
    /// The time when the run's first checkpoint was found, in nanoseconds since 1970.
    pub begun_ns: Option<u64>,
    pub base_name: Option<String>,
    /// Stamps of the processed saves, by step.
    pub seen: BTreeMap<u32, String>,
}

/// The scanner of one watched directory. Time is passed in; it does not sleep.
///
/// For each `checkpoint-N`, every scan does these steps:
///
/// 1. Skip the save if its stamp is already in the [`WatchRecord`].
/// 2. If it is staged and unchanged, leave it; if it changed, release it and check it again.
/// 3. Otherwise list and probe its files and judge its readiness. A ready checkpoint is staged.
///
/// [`CheckpointScanner::next_checkpoint`] returns the staged checkpoint with the lowest step after
/// its quiet period. The caller publishes it and calls [`CheckpointScanner::finish_checkpoint`], or
/// [`CheckpointScanner::release_step`] if it changed.
pub struct CheckpointScanner {
    directory: PathBuf,
    /// Used if the watched directory is not writable.
    fallback: PathBuf,
    settings: QuietSettings,
    /// Created when first needed.
    staging: Option<StagingDir>,
    record: WatchRecord,
    /// Not staged, by step.
    observed: BTreeMap<u32, ObservedDirectory>,
    /// With the time of staging, by step.
    staged: BTreeMap<u32, (StagedCheckpoint, Instant)>,
    /// Removed by the trainer before they could be staged.
    rotated: BTreeSet<u32>,
}

/// The last observation of a checkpoint directory that is not staged.
struct ObservedDirectory {
    listing: DirectoryListing,
    /// The listing has not changed since.
    since: Instant,
    reason: Option<String>,
    reported: bool,
    is_permanent: bool,
}

impl CheckpointScanner {
    /// Opens a directory, and continues where an earlier agent stopped. `fallback` is the staging
    /// directory if the watched one is not writable. Fails if another agent watches it.
    pub fn open_directory(
        directory: &Path,
        fallback: &Path,
        policy: QuietSettings,
    ) -> anyhow::Result<Self> {
        let mut scanner = Self {
            directory: directory.to_owned(),
            fallback: fallback.to_owned(),
            settings: policy,
            staging: StagingDir::find_existing(directory, fallback)?,
            record: WatchRecord::default(),
            observed: BTreeMap::new(),
            staged: BTreeMap::new(),
            rotated: BTreeSet::new(),
        };
        if let Some(stage) = &scanner.staging {
            scanner.record = stage.read(RECORD_FILE).unwrap_or_default();
            let now = Instant::now();
            scanner.staged =
                stage.list_staged()?.into_iter().map(|held| (held.step, (held, now))).collect();
        }
        Ok(scanner)
    }

    pub(crate) fn watch_record(&self) -> &WatchRecord {
        &self.record
    }

    /// Changes the persisted state and writes it.
    pub fn update_record(&mut self, change: impl FnOnce(&mut WatchRecord)) -> anyhow::Result<()> {
        change(&mut self.record);
        let memory = self.record.clone();
        Ok(self.open_staging()?.write(RECORD_FILE, &memory)?)
    }

    fn open_staging(&mut self) -> anyhow::Result<&StagingDir> {
        if self.staging.is_none() {
            self.staging = Some(StagingDir::create_below(&self.directory, &self.fallback)?);
        }
        self.staging.as_ref().ok_or_else(|| anyhow::anyhow!("created above (X101)"))
    }

    /// Scans all checkpoint directories once. Fails if another agent watches the directory.
    pub fn scan_directory(&mut self, now: Instant) -> anyhow::Result<()> {
        let found = match file_probes::list_checkpoints(&self.directory) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                tracing::warn!(%error, directory = %self.directory.display(), "looking");
                return Ok(());
            }
        };
        self.record_rotated(&found.iter().map(|(step, _)| *step).collect());
        for (step, path) in found {
            match self.scan_checkpoint(step, &path, now) {
                Ok(()) => {}
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Records and logs directories that disappeared before they were staged or processed.
    fn record_rotated(&mut self, there: &BTreeSet<u32>) {
        let gone: Vec<u32> =
            self.observed.keys().filter(|step| !there.contains(step)).copied().collect();
        for step in gone {
            self.observed.remove(&step);
            if !self.staged.contains_key(&step) && !self.record.seen.contains_key(&step) {
                self.rotated.insert(step);
                tracing::warn!(step, count = self.rotated.len(), "rotated before publish");
            }
        }
    }

    fn scan_checkpoint(&mut self, step: u32, path: &Path, now: Instant) -> anyhow::Result<()> {
        let listing = file_probes::list_files(path)?;
        if self.record.seen.get(&step).is_some_and(|seen| *seen == compute_stamp(&listing)) {
            self.observed.remove(&step);
            return Ok(());
        }
        if let Some((held, _)) = self.staged.get(&step) {
            if self.staging.as_ref().is_some_and(|stage| stage.is_unchanged(held, path)) {
                return Ok(());
            }
            tracing::info!(step, "changed after it was complete; checking again");
            self.release_step(step)?;
        }
        let sight = self.observed.entry(step).or_insert_with(|| ObservedDirectory::new(now));
        if sight.listing != listing {
            *sight = ObservedDirectory { listing: listing.clone(), ..ObservedDirectory::new(now) };
        } else if now.duration_since(sight.since) > CLOCK_GRANULARITY && sight.reason.is_some() {
            sight.report_once(step, now);
            return Ok(());
        }
        let worth = may_be_complete(&listing);
        let probes =
            if worth { file_probes::probe_files(path, &listing) } else { FileProbes::new() };
        match judge_readiness(step, &listing, &probes) {
            SaveReadiness::Ready(checkpoint) => {
                self.stage_checkpoint(step, path, &listing, &checkpoint, now)?;
            }
            SaveReadiness::NotYet(why) => self.record_reason(step, why, false, now),
            SaveReadiness::Broken(why) => self.record_reason(step, why, true, now),
        }
        Ok(())
    }

    fn record_reason(&mut self, step: u32, why: String, hopeless: bool, now: Instant) {
        if let Some(sight) = self.observed.get_mut(&step) {
            (sight.reason, sight.is_permanent) = (Some(why), hopeless);
            sight.report_once(step, now);
        }
    }

    /// Skips the checkpoint if 32 are staged already.
    fn stage_checkpoint(
        &mut self,
        step: u32,
        path: &Path,
        listing: &DirectoryListing,
        checkpoint: &CompleteCheckpoint,
        now: Instant,
    ) -> anyhow::Result<()> {
        if self.staged.len() >= HELD_MAX {
            let why = format!("waiting: {HELD_MAX} other checkpoints are to be published first");
            self.record_reason(step, why, false, now);
            return Ok(());
        }
        match self.open_staging()?.stage_checkpoint(step, path, listing, checkpoint) {
            Ok(Some(held)) => {
                tracing::debug!(step, "in hand");
                self.staged.insert(step, (held, now));
            }
            // It changed meanwhile; the next scan checks it again.
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.record_reason(step, format!("cannot be staged: {error}"), true, now),
        }
        Ok(())
    }

    /// Returns the staged checkpoint with the lowest step, if its quiet period is over.
    pub fn next_checkpoint(&self, now: Instant) -> Option<StagedCheckpoint> {
        let (held, since) = self.staged.values().next()?;
        let apart = self.settings.is_remote || held.ranks || has_multiple_ranks(&held.source);
        let quiet =
            if apart { self.settings.remote_quiet_period } else { self.settings.quiet_period };
        (now.duration_since(*since) >= quiet).then(|| held.clone())
    }

    pub fn has_staged(&self) -> bool {
        !self.staged.is_empty()
    }

    /// Returns the number of checkpoints that the trainer removed before they could be staged.
    pub(crate) fn rotated_count(&self) -> usize {
        self.rotated.len()
    }

    /// Returns why the newest permanently unready checkpoint cannot be published.
    pub(crate) fn permanent_trouble(&self) -> Option<String> {
        let hopeless = |(step, sight): (&u32, &ObservedDirectory)| {
            let why = sight.reason.as_ref().filter(|_| sight.is_permanent)?;
            Some(format!("checkpoint-{step}: {why}"))
        };
        self.observed.iter().rev().find_map(hopeless)
    }

    /// Returns true if neither the staged files nor their source changed.
    pub fn is_unchanged(&self, held: &StagedCheckpoint) -> bool {
        let source = self.directory.join(format!("checkpoint-{}", held.step));
        self.staging.as_ref().is_some_and(|stage| stage.is_unchanged(held, &source))
    }

    /// Returns the directory with the files to publish, after removing this host's paths from the
    /// settings. `base` replaces the base's name in an adapter's settings.
    pub fn prepare_files(
        &self,
        held: &StagedCheckpoint,
        base: Option<&str>,
    ) -> anyhow::Result<PathBuf> {
        let stage =
            self.staging.as_ref().ok_or_else(|| anyhow::anyhow!("nothing is in hand (X101)"))?;
        let directory = stage.files_directory(held.step);
        let name = match held.content {
            CheckpointContent::Adapter => checkpoint_files::ADAPTER_CONFIG,
            CheckpointContent::Model => checkpoint_files::MODEL_CONFIG,
        };
        let written: Map<String, Value> =
            serde_json::from_slice(&std::fs::read(directory.join(name))?)?;
        let mut settings = written.clone();
        strip_local_paths(&mut settings, base);
        if settings != written {
            stage.write_settings(held.step, name, &serde_json::to_vec_pretty(&settings)?)?;
        }
        Ok(directory)
    }

    pub fn trainer_state(&self, held: &StagedCheckpoint) -> Option<TrainerState> {
        self.staging.as_ref()?.read_trainer_state(held.step)
    }

    /// Records a checkpoint as processed and removes it from the staging directory.
    pub fn finish_checkpoint(&mut self, held: &StagedCheckpoint) -> anyhow::Result<()> {
        self.update_record(|memory| drop(memory.seen.insert(held.step, held.save_stamp())))?;
        self.release_step(held.step)
    }

    /// Removes a checkpoint from the staging directory. If its source still exists, the next scan
    /// checks it again.
    pub fn release_step(&mut self, step: u32) -> anyhow::Result<()> {
        self.staged.remove(&step);
        self.observed.remove(&step);
        Ok(self.open_staging()?.remove_step(step)?)
    }
}

impl ObservedDirectory {
    fn new(since: Instant) -> Self {
        Self {
            listing: DirectoryListing::new(),
            since,
            reason: None,
            reported: false,
            is_permanent: false,
        }
    }

    /// Logs the reason once: immediately if it is permanent, otherwise after 2 minutes.
    fn report_once(&mut self, step: u32, now: Instant) {
        let due = self.is_permanent || now.duration_since(self.since) > INCOMPLETE_WARN_AFTER;
        if let Some(why) = self.reason.as_ref().filter(|_| due && !self.reported) {
            tracing::warn!(step, why, "a checkpoint is not published");
            self.reported = true;
        }
    }
}

/// Also replaces the base's name. Local paths are meaningless and private elsewhere.
fn strip_local_paths(settings: &mut Map<String, Value>, base: Option<&str>) {
    if let (Some(base), Some(name)) = (base, settings.get_mut("base_model_name_or_path")) {
        *name = base.into();
    }
    let is_path =
        |value: &Value| value.as_str().is_some_and(|name| name.starts_with(['/', '.', '~']));
    if settings.get("_name_or_path").is_some_and(is_path) {
        settings.remove("_name_or_path");
    }
}

fn is_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| {
        matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
    })
}
