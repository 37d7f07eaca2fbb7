//! `flotilla run reproduce`: trains a checkpoint of the log again on this machine and compares the
//! result.

use std::{process::ExitCode, time::Duration};

use agent::{HostDoctor, WorkerLauncher};
use anyhow::{Context, bail};
use control::{FleetControl, parse_checkpoint_ref};
use serde_json::json;
use store::FileCache;
use trainer::{PyTorchProgram, Reproduction, ReproductionResult, TrainerConfig, TrainingEngine};
use wire::v1;

use crate::{
    args::ReproduceArgs, exit_codes, local_models, output, progress_meter::ProgressMeter,
    python_runner::find_python,
};

const CACHE_BYTES_MAX: u64 = 100 << 30;

pub(super) async fn reproduce_checkpoint(
    control: &FleetControl,
    args: &ReproduceArgs,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let reference = parse_checkpoint_ref(&args.checkpoint)?;
    let checkpoint = control.get_checkpoint(&reference).await?.checkpoint.unwrap_or_default();
    let name = format!("{}/{}/{}", checkpoint.run, checkpoint.cycle, checkpoint.step);
    let order = control.find_train_order(&checkpoint).await?;
    let order = order
        .with_context(|| format!("cannot reproduce {name}: it was not trained by this fleet"))?;
    let scratch = tempfile::tempdir().context("create a scratch directory")?;
    let launch = WorkerLauncher {
        dtype: args.dtype.type_name().to_owned(),
        ..local_models::worker_launcher(
            scratch.path(),
            args.profile.as_deref(),
            &args.device,
            args.threads,
        )?
    };
    let config = trainer_config(args, &checkpoint, launch)?;
    let elsewhere = local_models::find_external_sources(&args.models)?;
    let cache =
        FileCache::open_with_sources(&scratch.path().join("cache"), CACHE_BYTES_MAX, elsewhere)?;
    let out = scratch.path().join("training");
    std::fs::create_dir(&out).context("create a scratch directory")?;
    let reproduction = Reproduction {
        order: &order,
        checkpoint: &checkpoint,
        store: control.open_store().await?,
        cache: &cache,
        config: &config,
        scratch: &out,
    };
    let meter = ProgressMeter::new();
    let progress = |step, steps| {
        meter.show_progress("training again", "steps", u64::from(step), u64::from(steps));
    };
    let reproduced = match order.part {
        None => reproduction.reproduce_training(progress).await,
        Some(_) => {
            let outer_steps = control.find_merged_deltas(&checkpoint).await?;
            reproduction.reproduce_merges(&outer_steps, progress).await
        }
    };
    meter.finish_bar();
    let reproduced = reproduced.with_context(|| format!("train {name} again"))?;
    if as_json {
        output::print_json(&json!({
            "checkpoint": name,
            "same": reproduced.is_same(),
            "here": reproduced.local.to_string(),
            "there": reproduced.logged.to_string(),
            "engine": { "here": reproduced.engine, "there": checkpoint.engine },
            "differing": reproduced.differing,
            "distance": reproduced.distance,
        }))?;
    } else {
        print_comparison(&name, &checkpoint, &reproduced);
    }
    Ok(exit_codes::findings_code(!reproduced.is_same()))
}

fn trainer_config(
    args: &ReproduceArgs,
    checkpoint: &v1::Checkpoint,
    launch: WorkerLauncher,
) -> anyhow::Result<TrainerConfig> {
    let engine = match checkpoint.engine.split('-').next() {
        Some("pytorch") => {
            let python = find_python(args.python.as_deref())?;
            let prepared = PyTorchProgram::write_program(python, &launch.directory);
            TrainingEngine::PyTorch(prepared.context("write the training program")?)
        }
        Some("candle") => TrainingEngine::Candle,
        _ => bail!(
            "trained by engine {:?}, which this program does not support (E111)",
            checkpoint.engine
        ),
    };
    let doctor = HostDoctor::new(launch.root.clone(), Vec::new(), None);
    Ok(TrainerConfig { launch, engine, doctor, save_within: Duration::MAX, grace: Duration::ZERO })
}

fn print_comparison(name: &str, checkpoint: &v1::Checkpoint, reproduced: &ReproductionResult) {
    let ReproductionResult { local, logged, engine, differing, distance } = reproduced;
    if reproduced.is_same() {
        output::print_line(&format!("{name} reproduced bit for bit: {local}"));
        return;
    }
    output::print_line(&format!("{name} not reproduced: digest {local} here, {logged} in the log"));
    output::print_line(&format!(
        "trained by {} on {}, here by {engine}",
        checkpoint.engine, checkpoint.agent
    ));
    output::print_line(&format!("differing: {}", differing.join(", ")));
    if let Some(distance) = distance {
        output::print_line(&format!(
            "the weights differ by {distance:.2e} of their norm; another kind of processor or \
             another version rounds otherwise"
        ));
    }
}
