//! How an agent starts its workers: the same binary, `flotilla worker <kind>`.

use std::{collections::BTreeMap, ffi::OsString, path::PathBuf};

use crate::{Command, child::log_file};

/// What all workers of an agent have in common.
#[derive(Debug, Clone)]
pub struct Launch {
    pub program: PathBuf,
    /// Runs the worker's command line, which it is given as its arguments.
    pub wrapper: Option<PathBuf>,
    /// Cores a worker may use.
    pub threads: usize,
    /// `cpu`, `cuda`, `metal`, …
    pub device: String,
    /// The agent's own directory; logs go below.
    pub directory: PathBuf,
}

impl Launch {
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
