//! The commands of an agent's children: its own workers (the same binary, `flotilla worker <kind>`)
//! and external programs.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use hardware::HardwareProfile;

use crate::{AdaptiveTimeout, ChildCommand, ProcessGroups, child::log_path};

/// The settings that all workers of an agent share.
#[derive(Debug, Clone)]
pub struct WorkerLauncher {
    /// The agent's own binary.
    pub program: PathBuf,
    /// A program that runs each worker; it receives the worker's command line as its arguments.
    pub wrapper: Option<PathBuf>,
    /// The user's limit of a worker's silence, after which it counts as hung; it caps each role's
    /// own limits.
    pub silence_limit: Option<Duration>,
    /// The number of cores that a worker may use.
    pub threads: usize,
    /// `cpu`, `cuda`, `metal`, …
    pub device: String,
    /// The type in which candle holds weights: `f32` or `bf16`.
    pub dtype: String,
    /// The agent's own directory; logs are written below it.
    pub directory: PathBuf,
    /// The hardware profile, which sets variables in a child's environment.
    pub profile: HardwareProfile,
    /// The root of the host's file system: `/` except in tests.
    pub root: PathBuf,
    pub process_groups: ProcessGroups,
}

impl WorkerLauncher {
    /// Returns the settings of workers of `program` that use one core and hold weights in f32 on
    /// the CPU, without a wrapper or a limit of silence.
    pub fn new(program: PathBuf, directory: &Path, profile: HardwareProfile) -> Self {
        Self {
            program,
            wrapper: None,
            silence_limit: None,
            threads: 1,
            device: "cpu".to_owned(),
            dtype: "f32".to_owned(),
            directory: directory.to_owned(),
            profile,
            root: "/".into(),
            process_groups: ProcessGroups::default(),
        }
    }

    /// Returns the timeout for a worker's silence, with the bounds of [`AdaptiveTimeout::new`],
    /// both capped by the user's limit.
    pub fn silence_timeout(&self, first: Duration, floor: Duration) -> AdaptiveTimeout {
        let limit = self.silence_limit.unwrap_or(Duration::MAX);
        AdaptiveTimeout::new(first.min(limit), floor.min(limit))
    }

    /// Returns the command `flotilla worker <kind>` with the agent's settings and then `arguments`;
    /// starts nothing. `name` distinguishes the worker and its log file from others; the worker
    /// that does a role's work has the name of its work kind.
    pub fn worker_command(
        &self,
        kind: &str,
        name: &str,
        arguments: impl IntoIterator<Item = OsString>,
    ) -> ChildCommand {
        let fixed = ["worker", kind, "--device", &self.device, "--dtype", &self.dtype];
        let fixed = fixed.map(OsString::from);
        // One variable limits every rayon pool in the process.
        let threads = ("RAYON_NUM_THREADS".to_owned(), self.threads.to_string());
        let arguments = fixed.into_iter().chain(arguments);
        self.tool_command(&self.program, name, arguments, BTreeMap::from([threads]))
    }

    /// Returns the command of an external program, run by the wrapper if one is set; starts
    /// nothing. `name` is that of its log file. Its environment is the allow-list, then the
    /// hardware profile's variables, then `environment`; later values win.
    pub fn tool_command(
        &self,
        program: &Path,
        name: &str,
        arguments: impl IntoIterator<Item = OsString>,
        environment: BTreeMap<String, String>,
    ) -> ChildCommand {
        let wrapped = self.wrapper.as_ref().map(|_| program.to_owned().into_os_string());
        let mut variables = self.profile.child_variables();
        variables.extend(environment);
        ChildCommand {
            name: name.to_owned(),
            program: self.wrapper.as_deref().unwrap_or(program).to_owned(),
            arguments: wrapped.into_iter().chain(arguments).collect(),
            environment: variables,
            unset: self.profile.unset.clone(),
            log: log_path(&self.directory, name),
            root: self.root.clone(),
            process_groups: self.process_groups.clone(),
        }
    }
}
