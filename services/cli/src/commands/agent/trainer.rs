//! The engine that trains on this box, and the checks of its environment.

use std::{collections::BTreeMap, time::Duration};

use agent::{HostDoctor, WorkerLauncher};
use anyhow::Context;
use doctor::{DoctorFinding, Severity, check_torch_environment};
use hardware::torch_environment::TorchEnvironment;
use trainer::{PyTorchProgram, PythonRunner, TrainerConfig, TrainingEngine};
use wire::v1;

use crate::{
    args::{AgentArgs, TrainerEngine},
    python_runner::find_python,
};

/// It is not asked to save, so it gets as much as any other job.
const CANDLE_STOP_GRACE: Duration = Duration::from_secs(2);

/// Returns the withheld role instead if a PyTorch finding blocks training.
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
                find_python(args.converters.python.as_deref())?,
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
