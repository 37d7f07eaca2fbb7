//! How far a tracker is that cannot say so itself: a file.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::{Path, PathBuf},
};

use wire::RunId;

use crate::SinkError;

/// The place of the last fact that was taken of each run.
#[derive(Debug)]
pub(crate) struct State {
    path: PathBuf,
    cursors: BTreeMap<RunId, u64>,
}

impl State {
    /// # Errors
    /// When it cannot be read, or is none.
    pub(crate) fn open(path: PathBuf) -> Result<Self, SinkError> {
        let cursors = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
                let why = format!("it is no state of a feed ({error}); remove it to begin anew");
                refused(&path, why)
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(refused(&path, error.to_string())),
        };
        Ok(Self { path, cursors })
    }

    pub(crate) fn of(&self, run: &RunId) -> u64 {
        self.cursors.get(run).copied().unwrap_or(0)
    }

    /// Remembers it at the next `save`.
    pub(crate) fn set(&mut self, run: &RunId, cursor: u64) {
        self.cursors.insert(run.clone(), cursor);
    }

    /// Whole, or as it was.
    pub(crate) fn save(&self) -> Result<(), SinkError> {
        let beside = self.path.with_extension("new");
        let write = || {
            let text = serde_json::to_vec(&self.cursors)?;
            let mut file = std::fs::File::create(&beside)?;
            file.write_all(&text)?;
            file.sync_all()?;
            std::fs::rename(&beside, &self.path)
        };
        write().map_err(|error: io::Error| SinkError::of_file(keep(&self.path), &error))
    }
}

fn keep(path: &Path) -> String {
    format!("keep in {} how far it is", path.display())
}

fn refused(path: &Path, why: String) -> SinkError {
    SinkError::Never { what: keep(path), why }
}
