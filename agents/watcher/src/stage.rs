//! Taking hold of a checkpoint before its trainer removes it: hard links in a directory of our
//! own, on the trainer's file system. A crash leaves whole holds and nothing else.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::Context;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    files::{self, Content},
    readiness::{Checkpoint, Listing, Stat, TRAINER_STATE},
    scan,
    trainer_state::TrainerState,
};

/// Below the watched directory. Trainers remove and upload `checkpoint-…` only.
pub(crate) const STAGE: &str = ".flotilla-stage";

const HELD: &str = "held.json";
const FILES: &str = "files";

/// Waiting would not help.
#[derive(Debug, thiserror::Error)]
#[error("another agent watches this directory already: it holds {} (A105)", path.display())]
pub(crate) struct TakenError {
    path: PathBuf,
}

/// A checkpoint in our hands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Held {
    pub step: u32,
    pub content: Content,
    pub base_name: Option<String>,
    pub(crate) ranks: bool,
    /// Its directory as it was taken.
    pub(crate) source: Listing,
    /// What was taken, settings aside: those are copies, of which we are the only writer.
    taken: Listing,
}

impl Held {
    /// Tells this save from any other of the same step.
    pub(crate) fn stamp(&self) -> String {
        stamp(&self.source)
    }
}

/// Tells a directory's saves from each other.
pub(crate) fn stamp(source: &Listing) -> String {
    let saved = |(name, _): &(&String, _)| {
        files::is_weights(name) || files::is_settings(name) || name.as_str() == TRAINER_STATE
    };
    let text: Vec<String> =
        source.iter().filter(saved).map(|(name, stat)| format!("{name} {stat:?}\n")).collect();
    wire::Digest::of(text.concat().as_bytes()).to_string()
}

/// The directory of our own. One agent has it at a time.
#[derive(Debug)]
pub(crate) struct Stage {
    root: PathBuf,
    _lock: File,
}

impl Stage {
    /// Where an earlier agent left one, if it did.
    pub(crate) fn find(watched: &Path, fallback: &Path) -> anyhow::Result<Option<Self>> {
        let places = [watched.join(STAGE), fallback.to_owned()];
        places.into_iter().find(|place| place.is_dir()).map(Self::open).transpose()
    }

    /// In the watched directory, or where that cannot be written, in the agent's own.
    pub(crate) fn create(watched: &Path, fallback: &Path) -> anyhow::Result<Self> {
        let place = watched.join(STAGE);
        if let Err(error) = fs::create_dir_all(&place) {
            tracing::warn!(%error, place = %place.display(), "checkpoints will be copied");
            let path = fallback.display();
            fs::create_dir_all(fallback).with_context(|| format!("create {path}"))?;
            return Self::open(fallback.to_owned());
        }
        Self::open(place)
    }

    fn open(root: PathBuf) -> anyhow::Result<Self> {
        let path = root.join("lock");
        let lock = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { root, _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(TakenError { path }.into()),
            Err(TryLockError::Error(error)) => {
                Err(error).with_context(|| format!("lock {}", path.display()))
            }
        }
    }

    fn place(&self, step: u32) -> PathBuf {
        self.root.join(step.to_string())
    }

    /// What is to be published of a held checkpoint.
    pub(crate) fn files(&self, step: u32) -> PathBuf {
        self.place(step).join(FILES)
    }

    /// What the trainer said of it, if it said anything.
    pub(crate) fn trainer_state(&self, step: u32) -> Option<TrainerState> {
        TrainerState::parse(&fs::read(self.place(step).join(TRAINER_STATE)).ok()?)
    }

    /// Takes a checkpoint; `None` when it changed meanwhile.
    pub(crate) fn take(
        &self,
        step: u32,
        source: &Path,
        listing: &Listing,
        checkpoint: &Checkpoint,
    ) -> io::Result<Option<Held>> {
        let partial = self.root.join(format!("{step}.partial"));
        remove(&partial)?;
        let taken = match gather(&partial, source, listing, checkpoint) {
            Ok(Some(taken)) => taken,
            // Links that nobody knows of would keep their room on the disk.
            other => return remove(&partial).and(other.map(|_| None)),
        };
        let held = Held {
            step,
            content: checkpoint.content,
            base_name: checkpoint.base_name.clone(),
            ranks: checkpoint.ranks,
            source: listing.clone(),
            taken,
        };
        write_json(&partial.join(HELD), &held)?;
        remove(&self.place(step))?;
        fs::rename(&partial, self.place(step))?;
        Ok(Some(held))
    }

    /// Whether nobody wrote to what was taken, nor to where it was taken from. A directory that
    /// is gone was rotated away, which is why it was taken.
    pub(crate) fn is_unchanged(&self, held: &Held, source: &Path) -> bool {
        let files = self.files(held.step);
        let same = |(name, stat): (&String, &Stat)| {
            scan::stat(&files.join(name)).is_ok_and(|found| found == *stat)
        };
        let source_same = match scan::list(source) {
            Ok(listing) => is_remainder(&listing, &held.source),
            Err(_) => true,
        };
        held.taken.iter().all(same) && source_same
    }

    pub(crate) fn drop(&self, step: u32) -> io::Result<()> {
        remove(&self.place(step))
    }

    /// What an earlier agent held.
    pub(crate) fn held(&self) -> io::Result<Vec<Held>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.root)? {
            let path = entry?.path();
            if !path.is_dir() {
                continue;
            }
            match read_json::<Held>(&path.join(HELD)) {
                Some(held) if path == self.place(held.step) => found.push(held),
                // Whoever made it died before it was whole.
                _ => remove(&path)?,
            }
        }
        found.sort_by_key(|held| held.step);
        Ok(found)
    }

    /// Puts an own settings file in the place of the one that was copied.
    pub(crate) fn write_settings(&self, step: u32, name: &str, text: &[u8]) -> io::Result<()> {
        let partial = self.place(step).join("settings.partial");
        fs::write(&partial, text)?;
        fs::rename(partial, self.files(step).join(name))
    }

    pub(crate) fn read<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        read_json(&self.root.join(name))
    }

    pub(crate) fn write(&self, name: &str, value: &impl Serialize) -> io::Result<()> {
        let partial = self.root.join(format!("{name}.partial"));
        write_json(&partial, value)?;
        fs::rename(partial, self.root.join(name))
    }
}

/// Links what is published, copies what will be rewritten; `None` when that is no longer what
/// was listed. A directory that is being removed by then gave all it had.
fn gather(
    partial: &Path,
    source: &Path,
    listing: &Listing,
    checkpoint: &Checkpoint,
) -> io::Result<Option<Listing>> {
    fs::create_dir_all(partial.join(FILES))?;
    let mut taken = Listing::new();
    let mut whole = true;
    for name in &checkpoint.files {
        let (from, to) = (source.join(name), partial.join(FILES).join(name));
        if files::is_settings(name) {
            fs::copy(from, &to)?;
        } else {
            link_or_copy(&from, &to)?;
            taken.insert(name.clone(), scan::stat(&to)?);
        }
        let found = scan::stat(&to)?;
        whole &= listing.get(name).is_some_and(|listed| {
            let linked = found.inode == listed.inode;
            if linked { found == *listed } else { found.bytes == listed.bytes }
        });
    }
    if checkpoint.state.is_some() {
        fs::copy(source.join(TRAINER_STATE), partial.join(TRAINER_STATE))?;
    }
    let same = match scan::list(source) {
        Ok(now) => is_remainder(&now, listing),
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) => return Err(error),
    };
    Ok((whole && same).then_some(taken))
}

/// Whether a directory is what it was, or what is left of that while it is being removed: nothing
/// that is there is another file than before.
fn is_remainder(now: &Listing, before: &Listing) -> bool {
    now.iter().all(|(name, stat)| before.get(name) == Some(stat))
}

/// On file systems without hard links, or for a file that is a link itself, the bytes.
fn link_or_copy(from: &Path, to: &Path) -> io::Result<()> {
    let is_link = fs::symlink_metadata(from)?.is_symlink();
    if !is_link && fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    fs::copy(from, to).map(|_| ())
}

fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// On the disk before anybody gives it a name that counts.
fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    file.sync_all()
}
