//! Checks PyTorch in its own process before the first order. A wheel without kernels for the GPU,
//! or a faulty driver, should fail before an order is leased.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
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

/// The time after which a host that lacked bitsandbytes is probed again, if an order needs it.
const REPROBE_AFTER: Duration = Duration::from_secs(600);

/// The file in the agent's directory with the key of the last successful probe.
const RESULT_FILE: &str = "torch-probe.json";

/// The check that PyTorch works on this host, done once per agent. A success is also kept on disk
/// for later agents. It is dropped after a reboot, and after a failure that the GPU may have
/// caused.
#[derive(Default)]
pub(crate) struct TorchProbe {
    /// With the time of the probe.
    passed: Mutex<Option<(PassedProbe, Instant)>>,
}

/// The abilities of PyTorch on a host where the probe passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PassedProbe {
    /// True if bitsandbytes is installed, with which a base is held in 4 bits.
    quantizes: bool,
}

impl PassedProbe {
    /// Returns true if a training can start.
    fn is_enough(self, quantized: bool) -> bool {
        self.quantizes || !quantized
    }
}

impl TorchProbe {
    /// Runs the probe, unless it has passed already. The error blames the host and names the
    /// remedy; without bitsandbytes, only an order with a `quantized` base is left to other hosts.
    pub(crate) async fn ensure_passed(
        &self,
        pytorch: &PyTorchProgram,
        launch: &WorkerLauncher,
        quantized: bool,
    ) -> Result<(), JobError> {
        let mut passed = self.passed.lock().await;
        let probe = match *passed {
            // Later, bitsandbytes may have been installed.
            Some((probe, at)) if probe.is_enough(quantized) || at.elapsed() < REPROBE_AFTER => {
                probe
            }
            _ => {
                let probed = probe_unless_known(pytorch, launch, quantized).await;
                let probe = probed.map_err(JobError::blame_host)?;
                *passed = Some((probe, Instant::now()));
                probe
            }
        };
        if probe.is_enough(quantized) {
            return Ok(());
        }
        Err(JobError::host_unfit(anyhow!(
            "lora.quantize is nf4, and this Python has no bitsandbytes; run `pip install \
             bitsandbytes` in the trainer's environment (--python), use another box, or train \
             without lora.quantize (E115)"
        )))
    }

    /// Drops the result, so that the probe runs again before the next order.
    pub(crate) async fn invalidate_result(&self, launch: &WorkerLauncher) {
        *self.passed.lock().await = None;
        // The file may not exist.
        let _ = std::fs::remove_file(launch.directory.join(RESULT_FILE));
    }
}

/// Skips the probe if the file has a success with the same key, and it is enough.
async fn probe_unless_known(
    pytorch: &PyTorchProgram,
    launch: &WorkerLauncher,
    quantized: bool,
) -> Result<PassedProbe, JobError> {
    let known = launch.directory.join(RESULT_FILE);
    let key = |probe| cache_key(pytorch, launch, probe);
    if let Ok(text) = std::fs::read_to_string(&known) {
        let possible = [true, false].map(|quantizes| PassedProbe { quantizes });
        let matching = possible.into_iter().find(|probe| key(*probe).as_ref() == Some(&text));
        if let Some(probe) = matching.filter(|probe| probe.is_enough(quantized)) {
            return Ok(probe);
        }
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
    let probe = PassedProbe { quantizes: found.bitsandbytes };
    if let Some(key) = key(probe) {
        // Without the file, the next agent only probes again.
        let _ = std::fs::write(&known, key);
    }
    Ok(probe)
}

/// Starts Python once, so that uv has fetched the packages, which takes up to half an hour.
///
/// # Errors
/// When PyTorch does not work here.
pub async fn fetch_packages(
    pytorch: &PyTorchProgram,
    launch: &WorkerLauncher,
) -> Result<(), JobError> {
    run_probe(pytorch, launch).await.map(drop)
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

/// Returns the result and everything that it depends on: interpreter, torch, boot, profile and
/// device. Returns `None` if that is unknown before the start, as with `uv`.
fn cache_key(
    pytorch: &PyTorchProgram,
    launch: &WorkerLauncher,
    probe: PassedProbe,
) -> Option<String> {
    let PythonRunner::Interpreter(interpreter) = &pytorch.python else { return None };
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let (torch, changed) = read_torch_version(interpreter)?;
    let key = serde_json::json!({
        "interpreter": interpreter, "torch": torch, "changed": changed, "boot": boot.trim(),
        "profile": launch.profile.name, "device": launch.device, "bitsandbytes": probe.quantizes,
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use agent::JobFault;

    use super::*;

    /// Writes an interpreter that only answers a probe.
    fn write_interpreter(path: &Path, bitsandbytes: bool) {
        let report = serde_json::json!({
            "torch": "2.11.0", "hip": null, "transformers": "5.23.0", "peft": "0.21.2",
            "bitsandbytes": bitsandbytes, "error": 0.0,
        });
        let answer = serde_json::json!({"call": 1, "reply": report});
        std::fs::write(path, format!("#!/bin/sh\nread line; echo '{answer}'; sleep 100\n"))
            .unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[tokio::test]
    async fn a_host_without_bitsandbytes_leaves_trainings_in_four_bits_to_others() {
        let directory = tempfile::tempdir().unwrap();
        let python = directory.path().join("python");
        let runner = PythonRunner::Interpreter(python.clone());
        let pytorch = PyTorchProgram::write_program(runner, directory.path()).unwrap();
        let launch = crate::test_launcher(directory.path(), "cpu");
        write_interpreter(&python, false);
        let probe = TorchProbe::default();
        for _ in 0..2 {
            probe.ensure_passed(&pytorch, &launch, false).await.unwrap();
            let left = probe.ensure_passed(&pytorch, &launch, true).await.unwrap_err();
            let JobError::Failed { fault, message, .. } = &left else { panic!("{left}") };
            assert_eq!(*fault, JobFault::NeedsUnmet, "{message}");
            assert!(message.contains("pip install bitsandbytes"), "{message}");
        }
        write_interpreter(&python, true);
        TorchProbe::default().ensure_passed(&pytorch, &launch, true).await.unwrap();
    }
}
