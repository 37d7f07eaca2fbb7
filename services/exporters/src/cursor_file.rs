//! A file with the cursors of a tool that cannot store them itself.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use wire::RunId;

use crate::ExporterError;

/// The sequence of the last exported fact of each run, in a JSON file.
#[derive(Debug)]
pub(crate) struct CursorFile {
    path: PathBuf,
    cursors: BTreeMap<RunId, u64>,
}

impl CursorFile {
    /// Reads the file; a missing file has no cursors.
    pub(crate) fn open_file(path: PathBuf) -> Result<Self, ExporterError> {
        let cursors = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
                let why = format!(
                    "it is not a valid export state ({error}); remove it to start \
                                   from the beginning"
                );
                permanent_error(&path, why)
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(permanent_error(&path, error.to_string())),
        };
        Ok(Self { path, cursors })
    }

    /// Returns 0 for an unknown run.
    pub(crate) fn run_cursor(&self, run: &RunId) -> u64 {
        self.cursors.get(run).copied().unwrap_or(0)
    }

    pub(crate) fn set_cursor(&mut self, run: &RunId, cursor: u64) {
        self.cursors.insert(run.clone(), cursor);
    }

    /// Writes the file atomically: after a failure it has its previous content.
    pub(crate) fn save_file(&self) -> Result<(), ExporterError> {
        let written = serde_json::to_vec(&self.cursors)
            .map_err(io::Error::from)
            .and_then(|text| durable_files::replace_file(&self.path, &text, 0o666));
        written.map_err(|error| ExporterError::from_file_error(describe_action(&self.path), &error))
    }
}

fn describe_action(path: &Path) -> String {
    format!("save the export position in {}", path.display())
}

fn permanent_error(path: &Path, why: String) -> ExporterError {
    ExporterError::Permanent { what: describe_action(path), why }
}
