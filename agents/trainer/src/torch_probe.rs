//! Checks PyTorch in its own process before the first order. A wheel without kernels for the GPU,
//! or a faulty driver, should fail before an order is leased.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use agent::{AdaptiveTimeout, JobError, WorkerLauncher, WorkerProcess};
use anyhow::anyhow;
use serde_json::Value;
use tokio::sync::Mutex;

use crate::{
    config,
    messages::{ProbeReport, ProbeRequest, ProbeStage},
    pytorch::{PyTorchProgram, PythonRunner},
};

/// On a healthy host each stage takes seconds.
const STAGE_LIMIT: Duration = Duration::from_secs(60);

/// The longest time that `uv` may take to fetch torch for the first time.
const FETCH_LIMIT: Duration = Duration::from_secs(1800);

/// The file in the agent's directory with the key of the last successful probe.
const RESULT_FILE: &str = "torch-probe.json";

/// The check that PyTorch works on this host, done once per agent. A success is also kept on disk
/// for later agents. It is dropped after a reboot, and after a failure that the GPU may have
/// caused.
#[derive(Default)]
pub(crate) struct TorchProbe {
    passed: Mutex<bool>,
}

impl TorchProbe {
    /// Runs the probe, unless it has passed already. The error blames the host and names the
    /// remedy.
    pub(crate) async fn ensure_passed(
        &self,
        pytorch: &PyTorchProgram,
        launch: &WorkerLauncher,
    ) -> Result<(), JobError> {
        let mut passed = self.passed.lock().await;
        if !*passed {
            probe_unless_known(pytorch, launch).await.map_err(JobError::blame_host)?;
            *passed = true;
        }
        Ok(())
    }

    /// Drops the result, so that the probe runs again before the next order.
    pub(crate) async fn invalidate_result(&self, launch: &WorkerLauncher) {
        *self.passed.lock().await = false;
        // The file may not exist.
        let _ = std::fs::remove_file(launch.directory.join(RESULT_FILE));
    }
}

/// Skips the probe if the file has a success with the same key.
async fn probe_unless_known(
    pytorch: &PyTorchProgram,
    launch: &WorkerLauncher,
) -> Result<(), JobError> {
    let (known, key) = (launch.directory.join(RESULT_FILE), cache_key(pytorch, launch));
    if key.is_some() && std::fs::read_to_string(&known).ok() == key {
        return Ok(());
    }
    let found = run_probe(pytorch, launch).await?;
    check_gpu_name(&found, launch)?;
    tracing::info!(
        torch = found.torch,
        hip = found.hip,
        transformers = found.transformers,
        peft = found.peft,
        device = found.device,
        error = found.error,
        "torch works here"
    );
    if let Some(key) = key {
        // Without the file, the next agent only probes again.
        let _ = std::fs::write(&known, key);
    }
    Ok(())
}

/// A failure names the stage that the probe had reached.
async fn run_probe(
    pytorch: &PyTorchProgram,
    launch: &WorkerLauncher,
) -> Result<ProbeReport, JobError> {
    let worker = WorkerProcess::start(&pytorch.worker_command(launch, "torch-probe"))?;
    let first =
        if matches!(pytorch.python, PythonRunner::Uv(_)) { FETCH_LIMIT } else { STAGE_LIMIT };
    // There are too few stages to adapt the timeout: only its bounds apply.
    let mut patience = AdaptiveTimeout::new(first, STAGE_LIMIT);
    let stage = Arc::new(std::sync::Mutex::new("start".to_owned()));
    let at = stage.clone();
    let record_stage = move |progress: Value| {
        if let (Ok(ProbeStage { stage }), Ok(mut at)) =
            (serde_json::from_value(progress), at.lock())
        {
            *at = stage;
        }
        std::future::ready(())
    };
    let dtype = launch.profile.training.dtype.name().to_owned();
    let ask = ProbeRequest::Probe { device: config::torch_device(launch), dtype };
    let probed =
        worker.call_with_progress::<ProbeReport, _>(&ask, &mut patience, record_stage).await;
    match probed {
        Ok(probed) => Ok(probed),
        Err(error) => {
            let stage = stage.lock().map(|stage| stage.clone()).unwrap_or_default();
            let error = anyhow!("PyTorch does not work here: it was to {stage}: {error} (E108)");
            Err(JobError::from_model_worker(error, &worker).await)
        }
    }
}

/// Checks that torch and the kernel agree on the GPU's architecture. An override of the environment
/// makes them differ.
fn check_gpu_name(found: &ProbeReport, launch: &WorkerLauncher) -> Result<(), JobError> {
    let expected = launch.profile.name.as_str();
    match &found.gfx {
        Some(gfx) if expected.starts_with("gfx") && gfx != expected => {
            Err(JobError::host_broken(anyhow!(
                "torch sees a {gfx} where the kernel has a {expected}: unset \
                 HSA_OVERRIDE_GFX_VERSION, and check HIP_VISIBLE_DEVICES (E108)"
            )))
        }
        _ => Ok(()),
    }
}

/// Returns everything that the result depends on: interpreter, torch, boot, profile and device.
/// Returns `None` if that is unknown before the start, as with `uv`.
fn cache_key(pytorch: &PyTorchProgram, launch: &WorkerLauncher) -> Option<String> {
    let PythonRunner::Interpreter(interpreter) = &pytorch.python else { return None };
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let (torch, changed) = read_torch_version(interpreter)?;
    let key = serde_json::json!({
        "interpreter": interpreter, "torch": torch, "changed": changed, "boot": boot.trim(),
        "profile": launch.profile.name, "device": launch.device,
    });
    Some(key.to_string())
}

/// Reads the content of torch's version file, and its modification time in seconds.
fn read_torch_version(interpreter: &Path) -> Option<(String, u64)> {
    let path: PathBuf = hardware::torch_environment::torch_version_file(interpreter)?;
    let changed = std::fs::metadata(&path).ok()?.modified().ok()?;
    let changed = changed.duration_since(std::time::UNIX_EPOCH).ok()?.as_secs();
    Some((std::fs::read_to_string(path).ok()?, changed))
}
