//! The record of the changes of fixes, from which an undo restores a host.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use anyhow::Context;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

const JOURNAL_FILE: &str = "fixes.json";

/// Maximum size of the file; a larger one belongs to another program.
const JOURNAL_BYTES_MAX: u64 = 16 << 20;

/// All fixes that were applied and not undone, the first one first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FixJournal {
    pub records: Vec<FixRecord>,
}

/// One applied fix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FixRecord {
    /// The ids of the findings that it fixes.
    pub ids: Vec<String>,
    pub summary: String,
    pub steps: Vec<FixStep>,
}

/// One change, with the data to undo it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FixStep {
    File {
        path: String,
        /// The text before; `None` if there was no file.
        before: Option<String>,
        /// Mode, owner and group before.
        attributes: Option<(u32, u32, u32)>,
        after: String,
    },
    Command {
        undo: Vec<String>,
        /// True once the command has succeeded, until it is undone.
        #[serde(default)]
        is_done: bool,
    },
}

impl FixJournal {
    /// Reads the journal of a state directory; empty if it does not exist.
    ///
    /// # Errors
    /// When it cannot be read, is damaged, or is a file of another user than that of this process,
    /// because an undo runs the commands in it.
    pub fn read(state: &Path) -> anyhow::Result<Self> {
        Self::read_as(state, geteuid().as_raw())
    }

    fn read_as(state: &Path, user: u32) -> anyhow::Result<Self> {
        let path = journal_path(state);
        let named = || format!("read {}", path.display());
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            file => file.with_context(named)?,
        };
        let owner = file.metadata().with_context(named)?.uid();
        anyhow::ensure!(
            owner == user,
            "{}: it belongs to user {owner} instead of {user}, so its commands are not run; look \
             at it and remove it (A118)",
            path.display()
        );
        let mut bytes = Vec::new();
        file.take(JOURNAL_BYTES_MAX + 1).read_to_end(&mut bytes).with_context(named)?;
        anyhow::ensure!(
            bytes.len() as u64 <= JOURNAL_BYTES_MAX,
            "{}: larger than {JOURNAL_BYTES_MAX} bytes, so it is no journal (A118)",
            path.display()
        );
        serde_json::from_slice(&bytes).with_context(|| {
            format!("{}: damaged; restore the files by hand (A118)", path.display())
        })
    }

    /// Writes the journal so that it survives a power loss. It may contain text of private files,
    /// so that only its owner may read it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, state: &Path) -> anyhow::Result<()> {
        let path = journal_path(state);
        durable_files::create_directory(state, 0o700)
            .and_then(|()| {
                let bytes = serde_json::to_vec_pretty(self)?;
                durable_files::replace_file(&path, &bytes, 0o600)
            })
            .with_context(|| format!("write {}", path.display()))
    }
}

impl FixRecord {
    /// Records whether the command of a step has been run and not undone.
    pub(crate) fn set_done(&mut self, step: usize, is_now_done: bool) {
        if let Some(FixStep::Command { is_done, .. }) = self.steps.get_mut(step) {
            *is_done = is_now_done;
        }
    }
}

fn journal_path(state: &Path) -> PathBuf {
    state.join(JOURNAL_FILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_that_another_user_wrote_is_refused() {
        let state = tempfile::tempdir().unwrap();
        let own = geteuid().as_raw();
        FixJournal::default().write(state.path()).unwrap();
        assert_eq!(FixJournal::read(state.path()).unwrap(), FixJournal::default());
        let error = FixJournal::read_as(state.path(), own + 1).unwrap_err().to_string();
        assert!(error.contains(&format!("belongs to user {own} ")), "{error}");
        assert!(error.contains("(A118)"), "{error}");
    }

    #[test]
    fn a_step_of_an_earlier_journal_is_not_known_to_be_done() {
        let step: FixStep = serde_json::from_str(r#"{"command":{"undo":["a"]}}"#).unwrap();
        assert_eq!(step, FixStep::Command { undo: vec!["a".to_owned()], is_done: false });
    }
}
