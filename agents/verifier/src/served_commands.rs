//! Commands that keep running: pools of their processes, and the runtime that drives the pipes.

use std::{
    ffi::OsString,
    path::PathBuf,
    process::Command,
    sync::{Mutex, OnceLock, PoisonError},
    time::Duration,
};

use futures::future::{BoxFuture, FutureExt};
use line_programs::{
    CommandLauncher, LaunchedProgram, LineBounds, LineFailure, LineProgramError, LineProgramPool,
    PoolSettings, ProgramLauncher,
};
use sandbox::{ConnectedProgram, ProgramLimits, Sandbox, SandboxProgram};
use serde_json::{Map, Value};
use tokio::runtime::{self, Runtime};

use crate::host_process::{self, OUTPUT_BYTES_MAX, STDERR_BYTES_MAX};

/// Commands with running processes. A run has few verifiers; the processes of the command that was
/// asked the longest time ago are ended.
const COMMANDS_MAX: usize = 16;

/// Processes without a request for so long are ended.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// A command that keeps running, with everything that its processes depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServedCommand {
    pub place: ServedPlace,
    pub processes: usize,
    pub concurrent: usize,
    pub start_timeout: Duration,
}

/// The place where the processes run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ServedPlace {
    /// Outside of the sandbox, by a command line that hides the agent's directories.
    Masked { argv: Vec<OsString> },
    /// In the sandbox, with more paths shown.
    Contained { program: SandboxProgram, limits: ProgramLimits, shown: Vec<PathBuf> },
}

/// The running commands of a pipeline. Dropping it ends their processes.
#[derive(Debug, Default)]
pub(crate) struct ServedCommands {
    runtime: OnceLock<Runtime>,
    /// The one that was asked last is the last.
    pools: Mutex<Vec<(ServedCommand, LineProgramPool)>>,
}

impl ServedCommands {
    /// Sends a request to a process of the command and waits for the answer. `open_sandbox` is
    /// called if a contained command has no processes yet.
    pub(crate) fn request_answer(
        &self,
        command: ServedCommand,
        open_sandbox: impl FnOnce() -> Result<Sandbox, String>,
        request: &Map<String, Value>,
        timeout: Duration,
    ) -> Result<Map<String, Value>, LineProgramError> {
        let failed = |problem: String| LineProgramError {
            failure: LineFailure::NotStarted,
            problem,
            stderr: String::new(),
        };
        let runtime = self.ensure_runtime().map_err(failed)?;
        let pool = self.ensure_pool(runtime, command, open_sandbox).map_err(failed)?;
        runtime.block_on(pool.request_answer(request, timeout))
    }

    fn ensure_runtime(&self) -> Result<&Runtime, String> {
        if let Some(runtime) = self.runtime.get() {
            return Ok(runtime);
        }
        let mut builder = runtime::Builder::new_multi_thread();
        let built = builder.worker_threads(1).thread_name("served-commands").enable_all().build();
        let built = built.map_err(|error| format!("start a runtime: {error}"))?;
        Ok(self.runtime.get_or_init(|| built))
    }

    fn ensure_pool(
        &self,
        runtime: &Runtime,
        command: ServedCommand,
        open_sandbox: impl FnOnce() -> Result<Sandbox, String>,
    ) -> Result<LineProgramPool, String> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let known = pools.iter().position(|(known, _)| *known == command);
        let entry = match known {
            Some(place) => pools.remove(place),
            None => {
                let launcher = build_launcher(&command.place, open_sandbox)?;
                let settings = PoolSettings {
                    processes: command.processes,
                    concurrent: command.concurrent,
                    idle_timeout: IDLE_TIMEOUT,
                    bounds: LineBounds {
                        answer_bytes_max: OUTPUT_BYTES_MAX,
                        stderr_bytes_max: STDERR_BYTES_MAX,
                        start_timeout: command.start_timeout,
                        ..LineBounds::default()
                    },
                };
                let _entered = runtime.enter();
                (command, LineProgramPool::new(launcher, settings))
            }
        };
        let pool = entry.1.clone();
        pools.push(entry);
        if pools.len() > COMMANDS_MAX {
            pools.remove(0);
        }
        Ok(pool)
    }
}

impl Drop for ServedCommands {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Ends the tasks, which kill their processes. Waiting for that would panic in the
            // thread of another runtime.
            runtime.shutdown_background();
        }
    }
}

fn build_launcher(
    place: &ServedPlace,
    open_sandbox: impl FnOnce() -> Result<Sandbox, String>,
) -> Result<Box<dyn ProgramLauncher>, String> {
    match place {
        ServedPlace::Masked { argv } => {
            let (program, arguments) = argv.split_first().ok_or("argv is empty")?;
            let (program, arguments) = (program.clone(), arguments.to_vec());
            Ok(Box::new(CommandLauncher::new(move || {
                let mut command = Command::new(&program);
                command.args(&arguments);
                host_process::remove_own_variables(&mut command);
                command
            })))
        }
        ServedPlace::Contained { program, limits, shown } => {
            let sandbox = open_sandbox()?.with_read_only(shown);
            let (program, limits) = (program.clone(), limits.clone());
            Ok(Box::new(ContainedLauncher { sandbox, program, limits }))
        }
    }
}

/// Starts a process in a cell of its own.
struct ContainedLauncher {
    sandbox: Sandbox,
    program: SandboxProgram,
    limits: ProgramLimits,
}

impl ProgramLauncher for ContainedLauncher {
    fn launch_program(&self) -> BoxFuture<'_, Result<LaunchedProgram, String>> {
        let Self { sandbox, program, limits } = self;
        let (sandbox, program, limits) = (sandbox.clone(), program.clone(), limits.clone());
        let connect = move || sandbox.connect_program(&program, &limits);
        async move {
            let connected = tokio::task::spawn_blocking(connect).await;
            let connected = connected.map_err(|error| format!("start a cell: {error}"))?;
            let ConnectedProgram { child, guard } =
                connected.map_err(|broken| broken.to_string())?;
            Ok(LaunchedProgram::new(child, Some(Box::new(guard))))
        }
        .boxed()
    }
}
