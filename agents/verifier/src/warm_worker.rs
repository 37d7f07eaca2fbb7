//! The worker process of a role, started when it is needed and kept running.

use std::{sync::Mutex, time::Duration};

use agent::{JobError, WorkerLauncher, WorkerProcess};

use crate::Toolchain;

/// The longest timeout of a command, that of its start, and a minute; a worker without progress for
/// so long hangs.
pub(crate) const SILENCE_LIMIT: Duration = Duration::from_secs(3600 + 600 + 60);

/// Keys of judge models, which the worker inherits.
const KEY_VARIABLE_PREFIX: &str = "FLOTILLA_JUDGE_KEY";

pub(crate) struct WarmWorker {
    launch: WorkerLauncher,
    /// Of the worker's log.
    name: &'static str,
    process: Mutex<Option<WorkerProcess>>,
}

impl WarmWorker {
    pub(crate) fn new(launch: WorkerLauncher, name: &'static str) -> Self {
        Self { launch, name, process: Mutex::new(None) }
    }

    pub(crate) fn launch(&self) -> &WorkerLauncher {
        &self.launch
    }

    /// Returns the running worker, or starts one.
    pub(crate) fn ensure_running(&self, toolchain: &Toolchain) -> Result<WorkerProcess, JobError> {
        let mut warm = self.process.lock().map_err(|_| JobError::Stopped)?;
        if let Some(worker) = warm.as_ref().filter(|worker| worker.is_alive()) {
            return Ok(worker.clone());
        }
        let threads = self.launch.threads.to_string();
        let tools = serde_json::to_string(&toolchain.tools).map_err(JobError::retryable_failure)?;
        let grants =
            serde_json::to_string(&toolchain.grants).map_err(JobError::retryable_failure)?;
        let mut arguments =
            vec!["--threads".into(), threads.into(), "--tools".into(), tools.into()];
        arguments.extend(["--grants".into(), grants.into()]);
        if toolchain.contains {
            arguments.push("--contains".into());
        }
        for hidden in &toolchain.hidden {
            arguments.extend(["--hidden".into(), hidden.into()]);
        }
        let mut command = self.launch.worker_command("verify", self.name, arguments);
        let keys = std::env::vars_os()
            .filter_map(|(name, key)| Some((name.into_string().ok()?, key.into_string().ok()?)));
        command.environment.extend(keys.filter(|(name, _)| name.starts_with(KEY_VARIABLE_PREFIX)));
        let worker = WorkerProcess::start(&command)?;
        *warm = Some(worker.clone());
        Ok(worker)
    }
}
