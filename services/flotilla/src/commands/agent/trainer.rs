//! What trains on this box, and whether it can.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, bail};
use hardware::torch::{Finding, Severity, Snapshot, examine};
use runtime::{Doctor, Launch};
use trainer::{Config, Engine, PyTorch, Python};
use wire::v1;

use crate::cli::{AgentArgs, TrainerEngine};

/// What an embedded training, which is not told, may still do: as any other job.
const GRACE: Duration = Duration::from_secs(2);

/// What forbids training, when what was found of PyTorch does; it has been logged.
pub(super) fn config(
    args: &AgentArgs,
    launch: Launch,
    doctor: Doctor,
) -> anyhow::Result<Result<Config, v1::Withheld>> {
    let engine = match args.trainer_engine {
        TrainerEngine::Candle => Engine::Candle,
        TrainerEngine::Auto if launch.profile.is_cpu() => Engine::Candle,
        TrainerEngine::Auto | TrainerEngine::Pytorch => {
            let pytorch = PyTorch::prepare(python(args.python.as_deref())?, &launch.directory)
                .context("write the training program")?;
            if let Some(withheld) = unfit(&pytorch, &launch, &doctor) {
                return Ok(Err(withheld));
            }
            Engine::PyTorch(pytorch)
        }
    };
    let grace = match engine {
        Engine::Candle => GRACE,
        Engine::PyTorch(_) => Duration::from_secs(args.stop_grace),
    };
    let save_within = Duration::from_secs(args.save_within);
    Ok(Ok(Config { launch, engine, doctor, save_within, grace }))
}

/// The one that was asked for, or whatever `uv` makes.
pub(in crate::commands) fn python(asked: Option<&Path>) -> anyhow::Result<Python> {
    if let Some(path) = asked {
        if !path.is_file() {
            bail!(
                "--python {}: there is no such file; give an interpreter such as VENV/bin/python (A104)",
                path.display()
            );
        }
        return Ok(Python::Interpreter(std::path::absolute(path)?));
    }
    match on_path("uv") {
        Some(uv) => Ok(Python::Uv(uv)),
        None => bail!(
            "training with PyTorch needs --python VENV/bin/python (with torch, transformers, peft \
             and accelerate), or uv on PATH; --trainer-engine candle trains without (E108)"
        ),
    }
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|it| it.is_file())
}

/// Logs what is wrong with it. What `uv` makes cannot be read before it is made; the probe before
/// the first order tells.
fn unfit(pytorch: &PyTorch, launch: &Launch, doctor: &Doctor) -> Option<v1::Withheld> {
    let Python::Interpreter(interpreter) = &pytorch.python else { return None };
    let variables = pytorch.command(launch, "train").variables();
    let environment: BTreeMap<String, String> = variables
        .into_iter()
        .map(|(name, value)| (name, value.to_string_lossy().into_owned()))
        .collect();
    let snapshot = Snapshot::read(interpreter, environment, &launch.root);
    let findings = examine(&snapshot, &launch.profile);
    for finding in &findings {
        let (id, seen, remedy) = (finding.id, &finding.seen, &finding.remedy);
        match finding.severity {
            Severity::Fail => tracing::error!(id, seen, remedy, "this box does not train"),
            Severity::Warn => tracing::warn!(id, seen, remedy, "PyTorch"),
            Severity::Info => tracing::info!(id, seen, remedy, "PyTorch"),
        }
    }
    let counts =
        |finding: &&Finding| finding.severity == Severity::Fail && !doctor.ignores(finding.id);
    findings.iter().find(counts).map(|finding| v1::Withheld {
        role: "trainer".into(),
        finding: finding.id.into(),
        seen: finding.seen.clone(),
        remedy: format!("{}, and start the agent anew", finding.remedy),
    })
}
