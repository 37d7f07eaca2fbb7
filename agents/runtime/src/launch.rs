//! How an agent starts its workers: the same binary, `flotilla worker <kind>`.

use std::{collections::BTreeMap, ffi::OsString, path::PathBuf, time::Duration};

use crate::{Command, Patience, child::log_file};

/// What all workers of an agent have in common.
#[derive(Debug, Clone)]
pub struct Launch {
    pub program: PathBuf,
    /// Runs the worker's command line, which it is given as its arguments.
    pub wrapper: Option<PathBuf>,
    /// However slow its kind of work may be, a worker silent for so long is hung.
    pub silence: Option<Duration>,
    /// Cores a worker may use.
    pub threads: usize,
    /// `cpu`, `cuda`, `metal`, …
    pub device: String,
    /// The agent's own directory; logs go below.
    pub directory: PathBuf,
}

impl Launch {
    /// How long a worker of a kind may be silent: as [`Patience::new`], within the user's limit.
    pub fn patience(&self, first: Duration, floor: Duration) -> Patience {
        let limit = self.silence.unwrap_or(Duration::MAX);
        Patience::new(first.min(limit), floor.min(limit))
    }

    /// The command for a worker; `name` tells its log from those of others.
    pub fn worker(
        &self,
        kind: &str,
        name: &str,
        arguments: impl IntoIterator<Item = OsString>,
    ) -> Command {
        let fixed = ["worker", kind, "--device", &self.device].map(OsString::from);
        let wrapped = self.wrapper.as_ref().map(|_| self.program.clone().into_os_string());
        // One knob for every pool in the process.
        let environment =
            BTreeMap::from([("RAYON_NUM_THREADS".to_owned(), self.threads.to_string())]);
        Command {
            program: self.wrapper.as_ref().unwrap_or(&self.program).clone(),
            arguments: wrapped.into_iter().chain(fixed).chain(arguments).collect(),
            environment,
            log: log_file(&self.directory, name),
        }
    }
}
