//! How an agent starts its children: its own workers (the same binary, `flotilla worker
//! <kind>`), and other people's programs.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use hardware::Profile;

use crate::{Command, Herd, Patience, child::log_file};

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
    /// What candle holds weights as: `f32` or `bf16`.
    pub dtype: String,
    /// The agent's own directory; logs go below.
    pub directory: PathBuf,
    /// What the box's accelerator wants of a child's environment.
    pub profile: Profile,
    /// Where the box's own files are looked at: `/` but for tests.
    pub root: PathBuf,
    /// Which all children join.
    pub herd: Herd,
}

impl Launch {
    /// How long a worker of a kind may be silent: as [`Patience::new`], within the user's limit.
    pub fn patience(&self, first: Duration, floor: Duration) -> Patience {
        let limit = self.silence.unwrap_or(Duration::MAX);
        Patience::new(first.min(limit), floor.min(limit))
    }

    /// The command for a worker; `name` tells it and its log from others. What a role starts to do
    /// its work is called as the work is.
    pub fn worker(
        &self,
        kind: &str,
        name: &str,
        arguments: impl IntoIterator<Item = OsString>,
    ) -> Command {
        let fixed = ["worker", kind, "--device", &self.device, "--dtype", &self.dtype];
        let fixed = fixed.map(OsString::from);
        // One knob for every pool in the process.
        let threads = ("RAYON_NUM_THREADS".to_owned(), self.threads.to_string());
        let arguments = fixed.into_iter().chain(arguments);
        self.tool(&self.program, name, arguments, BTreeMap::from([threads]))
    }

    /// The command for a program that is not ours. Its environment is the allow-list, what the
    /// hardware's profile says, and `environment`, each before the one after it.
    pub fn tool(
        &self,
        program: &Path,
        name: &str,
        arguments: impl IntoIterator<Item = OsString>,
        environment: BTreeMap<String, String>,
    ) -> Command {
        let wrapped = self.wrapper.as_ref().map(|_| program.to_owned().into_os_string());
        let mut variables = self.profile.variables();
        variables.extend(environment);
        Command {
            name: name.to_owned(),
            program: self.wrapper.as_deref().unwrap_or(program).to_owned(),
            arguments: wrapped.into_iter().chain(arguments).collect(),
            environment: variables,
            unset: self.profile.unset.clone(),
            log: log_file(&self.directory, name),
            root: self.root.clone(),
            herd: self.herd.clone(),
        }
    }
}
