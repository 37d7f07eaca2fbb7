//! A smoke test of PyTorch in a process of its own, before the first order: a wheel without this
//! card's kernels, or a driver that faults, should be met while nothing is held.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::anyhow;
use runtime::{JobError, Launch, Patience, Worker};
use serde_json::Value;
use tokio::sync::Mutex;

use crate::{
    calls::{Ask, Probed, Stage},
    config,
    pytorch::{PyTorch, Python},
};

/// A stage that takes longer hangs: on a healthy box each takes seconds.
const STAGE_LIMIT: Duration = Duration::from_secs(60);

/// What `uv` may take to fetch torch the first time.
const FETCH_LIMIT: Duration = Duration::from_secs(1800);

/// In the agent's directory: what was found to work.
const FOUND_FILE: &str = "torch-probe.json";

/// Passed once per agent; what is known outlives the agent, but no restart of the box and no
/// death that the card may have had a part in.
#[derive(Default)]
pub(crate) struct Probe {
    passed: Mutex<bool>,
}

impl Probe {
    /// # Errors
    /// When torch does not work here, in words that say what to do about it. That is the box's
    /// fault, whatever was to be trained.
    pub(crate) async fn pass(&self, pytorch: &PyTorch, launch: &Launch) -> Result<(), JobError> {
        let mut passed = self.passed.lock().await;
        if !*passed {
            probe_unless_known(pytorch, launch).await.map_err(JobError::of_the_box)?;
            *passed = true;
        }
        Ok(())
    }

    /// To be passed again before the next order.
    pub(crate) async fn forget(&self, launch: &Launch) {
        *self.passed.lock().await = false;
        // It may not be there.
        let _ = std::fs::remove_file(launch.directory.join(FOUND_FILE));
    }
}

async fn probe_unless_known(pytorch: &PyTorch, launch: &Launch) -> Result<(), JobError> {
    let (known, key) = (launch.directory.join(FOUND_FILE), key(pytorch, launch));
    if key.is_some() && std::fs::read_to_string(&known).ok() == key {
        return Ok(());
    }
    let found = probe(pytorch, launch).await?;
    check(&found, launch)?;
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
        // Not knowing it the next time costs a probe.
        let _ = std::fs::write(&known, key);
    }
    Ok(())
}

async fn probe(pytorch: &PyTorch, launch: &Launch) -> Result<Probed, JobError> {
    let worker = Worker::start(&pytorch.command(launch, "torch-probe"))?;
    let first = if matches!(pytorch.python, Python::Uv(_)) { FETCH_LIMIT } else { STAGE_LIMIT };
    // Fewer stages than make a rhythm: only the bounds count.
    let mut patience = Patience::new(first, STAGE_LIMIT);
    let stage = Arc::new(std::sync::Mutex::new("start".to_owned()));
    let at = stage.clone();
    let heard = move |progress: Value| {
        if let (Ok(Stage { stage }), Ok(mut at)) = (serde_json::from_value(progress), at.lock()) {
            *at = stage;
        }
        std::future::ready(())
    };
    let dtype = config::dtype(launch.profile.training.dtype).to_owned();
    let ask = Ask::Probe { device: config::device(launch), dtype };
    let probed = worker.call::<Probed, _>(&ask, &mut patience, heard).await;
    match probed {
        Ok(probed) => Ok(probed),
        Err(error) => {
            let stage = stage.lock().map(|stage| stage.clone()).unwrap_or_default();
            let error = anyhow!("PyTorch does not work here: it was to {stage}: {error} (E108)");
            Err(JobError::of_model_worker(error, &worker).await)
        }
    }
}

/// What torch calls the card must be what the kernel calls it: an override makes it another.
fn check(found: &Probed, launch: &Launch) -> Result<(), JobError> {
    let expected = launch.profile.name.as_str();
    match &found.gfx {
        Some(gfx) if expected.starts_with("gfx") && gfx != expected => {
            Err(JobError::broken(anyhow!(
                "torch sees a {gfx} where the kernel has a {expected}: unset \
                 HSA_OVERRIDE_GFX_VERSION, and check HIP_VISIBLE_DEVICES (E108)"
            )))
        }
        _ => Ok(()),
    }
}

/// What the answer depends on, if that can be known without asking.
fn key(pytorch: &PyTorch, launch: &Launch) -> Option<String> {
    let Python::Interpreter(interpreter) = &pytorch.python else { return None };
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let (torch, changed) = torch_version(interpreter)?;
    let key = serde_json::json!({
        "interpreter": interpreter, "torch": torch, "changed": changed, "boot": boot.trim(),
        "profile": launch.profile.name, "device": launch.device,
    });
    Some(key.to_string())
}

fn torch_version(interpreter: &Path) -> Option<(String, u64)> {
    let path: PathBuf = hardware::torch::version_file(interpreter)?;
    let changed = std::fs::metadata(&path).ok()?.modified().ok()?;
    let changed = changed.duration_since(std::time::UNIX_EPOCH).ok()?.as_secs();
    Some((std::fs::read_to_string(path).ok()?, changed))
}
