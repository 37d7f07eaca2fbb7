//! The engine that trains on this box, and the checks of its environment.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use agent::{HostDoctor, WorkerLauncher};
use anyhow::{Context, bail};
use doctor::{DoctorFinding, Severity, check_torch_environment};
use hardware::torch_environment::TorchEnvironment;
use trainer::{PyTorchProgram, PythonRunner, TrainerConfig, TrainingEngine};
use wire::v1;

use crate::args::{AgentArgs, TrainerEngine};

/// Time that an embedded training has to end. It is not asked to save, so it gets as much as any
/// other job.
const CANDLE_STOP_GRACE: Duration = Duration::from_secs(2);

/// Builds the trainer's configuration. Returns the withheld role instead if a PyTorch finding
/// blocks training; the findings are logged.
pub(super) fn trainer_config(
    args: &AgentArgs,
    launch: WorkerLauncher,
    doctor: HostDoctor,
) -> anyhow::Result<Result<TrainerConfig, v1::Withheld>> {
    let engine = match args.trainer_engine {
        TrainerEngine::Candle => TrainingEngine::Candle,
        TrainerEngine::Auto if launch.profile.is_cpu() => TrainingEngine::Candle,
        TrainerEngine::Auto | TrainerEngine::Pytorch => {
            let pytorch = PyTorchProgram::write_program(
                find_python(args.python.as_deref())?,
                &launch.directory,
            )
            .context("write the training program")?;
            if let Some(withheld) = check_pytorch(&pytorch, &launch, &doctor) {
                return Ok(Err(withheld));
            }
            TrainingEngine::PyTorch(pytorch)
        }
    };
    let grace = match engine {
        TrainingEngine::Candle => CANDLE_STOP_GRACE,
        TrainingEngine::PyTorch(_) => Duration::from_secs(args.stop_grace),
    };
    let save_within = Duration::from_secs(args.save_within);
    Ok(Ok(TrainerConfig { launch, engine, doctor, save_within, grace }))
}

/// Returns the requested Python interpreter, or `uv` if it is on `PATH`.
///
/// # Errors
/// If the interpreter does not exist, or neither is available.
pub(in crate::commands) fn find_python(asked: Option<&Path>) -> anyhow::Result<PythonRunner> {
    if let Some(path) = asked {
        if !path.is_file() {
            bail!(
                "--python {}: no such file; pass an interpreter such as VENV/bin/python (A104)",
                path.display()
            );
        }
        return Ok(PythonRunner::Interpreter(std::path::absolute(path)?));
    }
    match find_on_path("uv") {
        Some(uv) => Ok(PythonRunner::Uv(uv)),
        None => bail!(
            "training with PyTorch needs --python VENV/bin/python (with torch, transformers, peft \
             and accelerate), or uv on PATH; --trainer-engine candle trains without (E108)"
        ),
    }
}

/// Returns the path of a program in `PATH`.
fn find_on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|it| it.is_file())
}

/// Checks the PyTorch environment, logs its findings and returns the first one that blocks
/// training.
///
/// An environment that `uv` creates does not exist yet; the trainer's probe checks it before the
/// first order.
fn check_pytorch(
    pytorch: &PyTorchProgram,
    launch: &WorkerLauncher,
    doctor: &HostDoctor,
) -> Option<v1::Withheld> {
    let PythonRunner::Interpreter(interpreter) = &pytorch.python else { return None };
    let variables = pytorch.worker_command(launch, "train").build_environment();
    let environment: BTreeMap<String, String> = variables
        .into_iter()
        .map(|(name, value)| (name, value.to_string_lossy().into_owned()))
        .collect();
    let snapshot = TorchEnvironment::read_environment(interpreter, environment, &launch.root);
    let findings = check_torch_environment(&snapshot, &launch.profile);
    for finding in &findings {
        let (id, seen, remedy) = (finding.id, &finding.seen, &finding.remedy);
        match finding.severity {
            Severity::Fail => tracing::error!(id, seen, remedy, "training disabled on this host"),
            Severity::Warn => tracing::warn!(id, seen, remedy, "PyTorch"),
            Severity::Info => tracing::info!(id, seen, remedy, "PyTorch"),
        }
    }
    let counts = |finding: &&DoctorFinding| {
        finding.severity == Severity::Fail && !doctor.is_ignored(finding.id)
    };
    findings.iter().find(counts).map(|finding| v1::Withheld {
        role: "trainer".into(),
        finding: finding.id.into(),
        seen: finding.seen.clone(),
        remedy: format!("{}, then restart the agent", finding.remedy),
    })
}
