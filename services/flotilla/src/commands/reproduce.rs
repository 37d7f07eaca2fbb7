//! `flotilla run reproduce`: a training of the log done again here, and what came of it compared.

use std::{process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use control::{Control, parse_checkpoint_ref};
use runtime::{Doctor, Launch};
use serde_json::json;
use store::Cache;
use trainer::{Again, Config, Engine, PyTorch, Reproduced};
use wire::v1;

use super::{FINDINGS, agent::trainer::python};
use crate::{cli::ReproduceArgs, local, meter::Meter, output};

/// What models, adapters and datasets may take meanwhile.
const CACHE_BYTES: u64 = 100 << 30;

pub(super) async fn reproduce(
    control: &Control,
    args: &ReproduceArgs,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let reference = parse_checkpoint_ref(&args.checkpoint)?;
    let checkpoint = control.checkpoint(&reference).await?.checkpoint.unwrap_or_default();
    let name = format!("{}/{}/{}", checkpoint.run, checkpoint.cycle, checkpoint.step);
    let order = control.train_order(&checkpoint).await?;
    let order = order.with_context(|| {
        format!("{name} was not trained by this fleet's order: there is nothing to do again")
    })?;
    let scratch = tempfile::tempdir().context("create a scratch directory")?;
    let launch = Launch {
        dtype: args.dtype.name().to_owned(),
        ..local::launch(scratch.path(), args.profile.as_deref(), &args.device, args.threads)?
    };
    let config = config(args, &checkpoint, launch)?;
    let elsewhere = local::elsewhere(&args.models)?;
    let cache = Cache::with(&scratch.path().join("cache"), CACHE_BYTES, elsewhere)?;
    let out = scratch.path().join("training");
    std::fs::create_dir(&out).context("create a scratch directory")?;
    let again = Again {
        order: &order,
        checkpoint: &checkpoint,
        store: control.store().await?,
        cache: &cache,
        config: &config,
        scratch: &out,
    };
    let meter = Meter::new();
    let reproduced = again
        .reproduce(|step, steps| {
            meter.show("training again", "steps", u64::from(step), u64::from(steps));
        })
        .await;
    meter.end();
    let reproduced = reproduced.with_context(|| format!("train {name} again"))?;
    if as_json {
        output::print_json(&json!({
            "checkpoint": name,
            "same": reproduced.is_same(),
            "here": reproduced.here.to_string(),
            "there": reproduced.there.to_string(),
            "engine": { "here": reproduced.engine, "there": checkpoint.engine },
            "differing": reproduced.differing,
            "distance": reproduced.distance,
        }))?;
    } else {
        tell(&name, &checkpoint, &reproduced);
    }
    Ok(if reproduced.is_same() { ExitCode::SUCCESS } else { ExitCode::from(FINDINGS) })
}

/// With the engine that trained it then.
fn config(
    args: &ReproduceArgs,
    checkpoint: &v1::Checkpoint,
    launch: Launch,
) -> anyhow::Result<Config> {
    let engine = match checkpoint.engine.split('-').next() {
        Some("pytorch") => {
            let python = python(args.python.as_deref())?;
            let prepared = PyTorch::prepare(python, &launch.directory);
            Engine::PyTorch(prepared.context("write the training program")?)
        }
        Some("candle") => Engine::Candle,
        _ => bail!("{:?} trained it, which this program does not know (E111)", checkpoint.engine),
    };
    let doctor = Doctor::new(launch.root.clone(), Vec::new(), None);
    Ok(Config { launch, engine, doctor, save_within: Duration::MAX, grace: Duration::ZERO })
}

fn tell(name: &str, checkpoint: &v1::Checkpoint, reproduced: &Reproduced) {
    let Reproduced { here, there, engine, differing, distance } = reproduced;
    if reproduced.is_same() {
        output::print(&format!("{name} came out the same to the last bit: {here}"));
        return;
    }
    output::print(&format!("{name} came out otherwise: {here} here, {there} in the log"));
    output::print(&format!(
        "trained by {} on {}, here by {engine}",
        checkpoint.engine, checkpoint.agent
    ));
    output::print(&format!("differing: {}", differing.join(", ")));
    if let Some(distance) = distance {
        output::print(&format!(
            "the weights differ by {distance:.2e} of their norm; another kind of processor or \
             another version rounds otherwise"
        ));
    }
}
