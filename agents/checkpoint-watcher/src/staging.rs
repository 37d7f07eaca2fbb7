//! The staging directory: keeps a checkpoint before its trainer removes it, by hard links on the
//! trainer's file system. After a crash it contains only complete checkpoints; partial ones are
//! removed.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::Context;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    checkpoint_files::{self, CheckpointContent},
    file_probes,
    readiness::{CompleteCheckpoint, DirectoryListing, FileStat, TRAINER_STATE},
    trainer_state::TrainerState,
};

/// Below the watched directory. Trainers remove and upload only `checkpoint-…`.
pub(crate) const STAGING_NAME: &str = ".flotilla-stage";

/// Describes a staged checkpoint.
const CHECKPOINT_FILE: &str = "held.json";
const FILES_NAME: &str = "files";

/// Another agent watches the directory; waiting would not help.
#[derive(Debug, thiserror::Error)]
#[error("another agent watches this directory already: it holds {} (A105)", path.display())]
pub(crate) struct DirectoryTakenError {
    path: PathBuf,
}

/// A checkpoint in the staging directory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StagedCheckpoint {
    pub step: u32,
    pub content: CheckpointContent,
    pub base_name: Option<String>,
    pub(crate) ranks: bool,
    /// The source directory at the time of staging.
    pub(crate) source: DirectoryListing,
    /// Without settings: those are copies that only this agent writes.
    taken: DirectoryListing,
}

impl StagedCheckpoint {
    /// Returns a digest that differs for each save of the same step.
    pub(crate) fn save_stamp(&self) -> String {
        compute_stamp(&self.source)
    }
}

/// Digests the metadata of weights, settings and trainer state, to distinguish saves of one
/// directory.
pub(crate) fn compute_stamp(source: &DirectoryListing) -> String {
    let saved = |(name, _): &(&String, _)| {
        checkpoint_files::is_weights(name)
            || checkpoint_files::is_settings(name)
            || name.as_str() == TRAINER_STATE
    };
    let text: Vec<String> =
        source.iter().filter(saved).map(|(name, stat)| format!("{name} {stat:?}\n")).collect();
    wire::Digest::hash_bytes(text.concat().as_bytes()).to_string()
}

/// The locked staging directory of one agent.
///
/// ```text
/// ROOT/lock               held while the agent runs
/// ROOT/watch.json         WatchRecord
/// ROOT/STEP.partial/      being staged; renamed to STEP when complete
/// ROOT/STEP/held.json     StagedCheckpoint
/// ROOT/STEP/files/        files to publish: links, and copies of settings
/// ```
#[derive(Debug)]
pub(crate) struct StagingDir {
    root: PathBuf,
    _lock: File,
}

impl StagingDir {
    pub(crate) fn find_existing(watched: &Path, fallback: &Path) -> anyhow::Result<Option<Self>> {
        let places = [watched.join(STAGING_NAME), fallback.to_owned()];
        places.into_iter().find(|place| place.is_dir()).map(Self::open_locked).transpose()
    }

    /// Creates the directory at `fallback` if the watched one is not writable.
    pub(crate) fn create_below(watched: &Path, fallback: &Path) -> anyhow::Result<Self> {
        let place = watched.join(STAGING_NAME);
        if let Err(error) = fs::create_dir_all(&place) {
            tracing::warn!(%error, place = %place.display(), "checkpoints will be copied");
            let path = fallback.display();
            fs::create_dir_all(fallback).with_context(|| format!("create {path}"))?;
            return Self::open_locked(fallback.to_owned());
        }
        Self::open_locked(place)
    }

    /// Fails with [`DirectoryTakenError`] if another agent holds the lock.
    fn open_locked(root: PathBuf) -> anyhow::Result<Self> {
        let path = root.join("lock");
        let lock = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { root, _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(DirectoryTakenError { path }.into()),
            Err(TryLockError::Error(error)) => {
                Err(error).with_context(|| format!("lock {}", path.display()))
            }
        }
    }

    fn step_directory(&self, step: u32) -> PathBuf {
        self.root.join(step.to_string())
    }

    pub(crate) fn files_directory(&self, step: u32) -> PathBuf {
        self.step_directory(step).join(FILES_NAME)
    }

    /// Returns `None` if the state is missing or invalid.
    pub(crate) fn read_trainer_state(&self, step: u32) -> Option<TrainerState> {
        TrainerState::parse(&fs::read(self.step_directory(step).join(TRAINER_STATE)).ok()?)
    }

    /// Returns `None` if the checkpoint changed meanwhile.
    pub(crate) fn stage_checkpoint(
        &self,
        step: u32,
        source: &Path,
        listing: &DirectoryListing,
        checkpoint: &CompleteCheckpoint,
    ) -> io::Result<Option<StagedCheckpoint>> {
        let partial = self.root.join(format!("{step}.partial"));
        remove_directory(&partial)?;
        let taken = match gather_files(&partial, source, listing, checkpoint) {
            Ok(Some(taken)) => taken,
            // Unused links would occupy disk space.
            other => return remove_directory(&partial).and(other.map(|_| None)),
        };
        let held = StagedCheckpoint {
            step,
            content: checkpoint.content,
            base_name: checkpoint.base_name.clone(),
            ranks: checkpoint.ranks,
            source: listing.clone(),
            taken,
        };
        write_json(&partial.join(CHECKPOINT_FILE), &held)?;
        remove_directory(&self.step_directory(step))?;
        fs::rename(&partial, self.step_directory(step))?;
        Ok(Some(held))
    }

    /// Treats a missing source as unchanged: the trainer removed it, which staging expects.
    pub(crate) fn is_unchanged(&self, held: &StagedCheckpoint, source: &Path) -> bool {
        let files = self.files_directory(held.step);
        let same = |(name, stat): (&String, &FileStat)| {
            file_probes::read_stat(&files.join(name)).is_ok_and(|found| found == *stat)
        };
        let source_same = match file_probes::list_files(source) {
            Ok(listing) => is_remainder(&listing, &held.source),
            Err(_) => true,
        };
        held.taken.iter().all(same) && source_same
    }

    pub(crate) fn remove_step(&self, step: u32) -> io::Result<()> {
        remove_directory(&self.step_directory(step))
    }

    /// Lists what an earlier agent staged, by step, and removes partial checkpoints.
    pub(crate) fn list_staged(&self) -> io::Result<Vec<StagedCheckpoint>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.root)? {
            let path = entry?.path();
            if !path.is_dir() {
                continue;
            }
            match read_json::<StagedCheckpoint>(&path.join(CHECKPOINT_FILE)) {
                Some(held) if path == self.step_directory(held.step) => found.push(held),
                // The agent that made it died before it was complete.
                _ => remove_directory(&path)?,
            }
        }
        found.sort_by_key(|held| held.step);
        Ok(found)
    }

    pub(crate) fn write_settings(&self, step: u32, name: &str, text: &[u8]) -> io::Result<()> {
        let partial = self.step_directory(step).join("settings.partial");
        fs::write(&partial, text)?;
        fs::rename(partial, self.files_directory(step).join(name))
    }

    /// Returns `None` if the file is missing or invalid.
    pub(crate) fn read<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        read_json(&self.root.join(name))
    }

    /// Replaces the file atomically.
    pub(crate) fn write(&self, name: &str, value: &impl Serialize) -> io::Result<()> {
        let partial = self.root.join(format!("{name}.partial"));
        write_json(&partial, value)?;
        fs::rename(partial, self.root.join(name))
    }
}

/// Links the files to publish and copies those that will be rewritten. Returns `None` if they no
/// longer match the listing. A source that is being removed matches if all files were gathered.
fn gather_files(
    partial: &Path,
    source: &Path,
    listing: &DirectoryListing,
    checkpoint: &CompleteCheckpoint,
) -> io::Result<Option<DirectoryListing>> {
    fs::create_dir_all(partial.join(FILES_NAME))?;
    let mut taken = DirectoryListing::new();
    let mut whole = true;
    for name in &checkpoint.files {
        let (from, to) = (source.join(name), partial.join(FILES_NAME).join(name));
        if checkpoint_files::is_settings(name) {
            fs::copy(from, &to)?;
        } else {
            link_or_copy(&from, &to)?;
            taken.insert(name.clone(), file_probes::read_stat(&to)?);
        }
        let found = file_probes::read_stat(&to)?;
        whole &= listing.get(name).is_some_and(|listed| {
            let linked = found.inode == listed.inode;
            if linked { found == *listed } else { found.bytes == listed.bytes }
        });
    }
    if checkpoint.state.is_some() {
        fs::copy(source.join(TRAINER_STATE), partial.join(TRAINER_STATE))?;
    }
    let same = match file_probes::list_files(source) {
        Ok(now) => is_remainder(&now, listing),
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) => return Err(error),
    };
    Ok((whole && same).then_some(taken))
}

/// Returns true if each present file is the same as before. Files may be missing, as the directory
/// may be in removal.
fn is_remainder(now: &DirectoryListing, before: &DirectoryListing) -> bool {
    now.iter().all(|(name, stat)| before.get(name) == Some(stat))
}

/// Copies on file systems without hard links, or if the file is a symbolic link.
fn link_or_copy(from: &Path, to: &Path) -> io::Result<()> {
    let is_link = fs::symlink_metadata(from)?.is_symlink();
    if !is_link && fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    fs::copy(from, to).map(|_| ())
}

fn remove_directory(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns `None` if the file is missing or invalid.
fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Syncs the file to disk, so that a later rename publishes complete data.
fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    file.sync_all()
}
