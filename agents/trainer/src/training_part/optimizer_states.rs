//! The optimizer's states of slices on this host. They never leave it: they are several times as
//! large as an adapter, and without them a slice only begins with a new state.

use std::path::{Path, PathBuf};

use wire::{Digest, RunId};

/// Directory of the states below that of the agent.
const STATES_DIR: &str = "optimizer-states";

/// Trainings whose states are kept; those that were used last.
const TRAININGS_MAX: usize = 4;

/// States of a training that are kept: a slice may be ordered again, and a box may have two.
const STATES_MAX: usize = 3;

/// The states of one training, by the digests of the weights that they belong to.
#[derive(Debug, Clone)]
pub(super) struct OptimizerStates {
    root: PathBuf,
    directory: PathBuf,
}

impl OptimizerStates {
    pub(super) fn for_training(agent: &Path, run: &RunId, cycle: u32) -> Self {
        let root = agent.join(STATES_DIR);
        Self { directory: root.join(format!("{run}-c{cycle}")), root }
    }

    /// Returns the state that belongs to weights, by their manifest digest; `None` if this host does
    /// not have it.
    pub(super) fn find_state(&self, manifest: &str) -> Option<PathBuf> {
        self.path_for(manifest).filter(|path| path.is_dir())
    }

    fn path_for(&self, manifest: &str) -> Option<PathBuf> {
        let digest: Digest = manifest.parse().ok()?;
        Some(self.directory.join(digest.to_hex()))
    }

    /// Moves the state in `from` here, as that of weights. A failure is logged.
    pub(super) fn keep_state(&self, manifest: &str, from: &Path) {
        let Some(path) = self.path_for(manifest) else { return };
        let moved = std::fs::create_dir_all(&self.directory).and_then(|()| {
            let _ = std::fs::remove_dir_all(&path);
            std::fs::rename(from, &path)
        });
        if let Err(error) = moved {
            let path = path.display().to_string();
            tracing::warn!(path, %error, "an optimizer's state could not be kept");
        }
        remove_oldest(&self.directory, STATES_MAX);
        remove_oldest(&self.root, TRAININGS_MAX);
    }
}

/// Removes all directories but those that changed last.
fn remove_oldest(parent: &Path, kept: usize) {
    let mut directories = list_directories(parent);
    let changed = |path: &PathBuf| path.metadata().and_then(|about| about.modified()).ok();
    directories.sort_by_key(|path| std::cmp::Reverse(changed(path)));
    for old in directories.into_iter().skip(kept) {
        let _ = std::fs::remove_dir_all(old);
    }
}

fn list_directories(parent: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_states_of_a_few_trainings_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let digest = |text: &str| Digest::hash_bytes(text.as_bytes()).to_string();
        let keep = |run: &str, name: &str| {
            // File systems have coarse times.
            std::thread::sleep(std::time::Duration::from_millis(20));
            let states = OptimizerStates::for_training(dir.path(), &run.parse().unwrap(), 0);
            let from = dir.path().join("saved");
            std::fs::create_dir_all(&from).unwrap();
            std::fs::write(from.join("state.json"), name).unwrap();
            states.keep_state(&digest(name), &from);
            states
        };
        let states = ["a", "b", "c", "d"].map(|name| keep("r0", name))[3].clone();
        let has = |name: &str| states.find_state(&digest(name)).is_some();
        assert_eq!(["a", "b", "c", "d"].map(has), [false, true, true, true]);
        let path = states.find_state(&digest("d")).unwrap();
        assert_eq!(std::fs::read_to_string(path.join("state.json")).unwrap(), "d");
        assert!(states.find_state("").is_none());
        for run in ["r1", "r2", "r3", "r4"] {
            keep(run, "a");
        }
        assert!(!has("d"), "the oldest training");
    }
}
