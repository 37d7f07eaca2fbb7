//! Measures the time from a checkpoint's fact to the process that evaluates it.
//!
//! It uses a real bus, a real agent and a model of the demo's size whose files are already in the
//! agent's cache.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use cli::output;
use control::SpecFiles;
use engine::{Device, LanguageModel, ScratchShape, write_scratch_model};
use store::FileCache;
use wire::{Fact, FactBody, FactKey, RunId, Subject, v1};

use super::{BenchFigure, fixture::FleetFixture, procfs};

/// Measured checkpoints, after a first one that fetches the model.
const CHECKPOINTS: u32 = 20;

/// Accepted median, in milliseconds.
const LIMIT_MS: f64 = 50.0;

/// Longest wait from a fact to the worker process, and from there to the evaluation's fact.
const LIMIT: Duration = Duration::from_secs(30);
/// Interval between two checks for the evaluation's fact.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Delay until an agent that wrote its evaluation has also acknowledged the job.
const ACK_DELAY: Duration = Duration::from_millis(100);

/// Name of the suite.
const SUITE: &str = "text";

/// The spec that is submitted.
const SPEC: &str = "\
name: bench
base: { model: model }
evals:
  - { name: text, text: text.txt, n_ctx: 64, chunks: 1 }
sft: { data: data.jsonl }
";

pub(super) async fn measure_start(rig: &FleetFixture) -> anyhow::Result<[BenchFigure; 3]> {
    output::print_message(&format!("start: {CHECKPOINTS} checkpoints to a running evaluator …"));
    let run = submit_spec(rig).await?;
    let tree = read_base(rig, &run).await?;
    let [cold, warm] = measure_transfer(rig, &tree).await?;
    let agent = rig.start_agent("bench-evaluator", "evaluator").await?;
    let mut taken = Vec::new();
    for step in 0..=CHECKPOINTS {
        let child = procfs::watch_next_worker(agent.pid, LIMIT);
        let began = Instant::now();
        publish_checkpoint(rig, &run, step, tree.clone()).await?;
        let seen = tokio::task::spawn_blocking(move || child.join()).await?;
        let seen = seen.map_err(|_| anyhow::anyhow!("the watching thread ended"))??;
        taken.push(to_milliseconds(seen.saturating_duration_since(began)));
        await_eval(rig, &run, step).await?;
    }
    agent.stop().await;
    let first = taken.remove(0);
    taken.sort_by(f64::total_cmp);
    let quantile = |percent: usize| taken[(taken.len() * percent).div_ceil(100).max(1) - 1];
    let how = format!("fact published to worker running, {CHECKPOINTS} times, files in the cache");
    Ok([
        BenchFigure {
            name: "start: median",
            measured: quantile(50),
            unit: "ms",
            limit: Some(LIMIT_MS),
            how,
        },
        BenchFigure {
            name: "start: p90",
            measured: quantile(90),
            unit: "ms",
            limit: None,
            how: format!("the first, which fetches the files, took {first:.1} ms"),
        },
        BenchFigure {
            name: "start: transfer",
            measured: to_milliseconds(cold),
            unit: "ms",
            limit: None,
            how: format!(
                "that model into an empty cache; {:.2} ms when it is there",
                to_milliseconds(warm)
            ),
        },
    ])
}

async fn submit_spec(rig: &FleetFixture) -> anyhow::Result<RunId> {
    let files = rig.directory_path().join("spec");
    write_files(&files).context("write a small model")?;
    Ok(rig.control_client().submit_run(SPEC, &SpecFiles::Local(files), "").await?.run)
}

fn write_files(directory: &Path) -> anyhow::Result<()> {
    let model = directory.join("model");
    let config = write_scratch_model(&model, &ScratchShape::default())?;
    LanguageModel::init_random(config, 1, &Device::Cpu)?.save_directory(&model)?;
    std::fs::write(directory.join("text.txt"), "7+5=12 4+8+1=13 #132\n".repeat(16))?;
    std::fs::write(directory.join("data.jsonl"), "{\"prompt\":\"1+1=\",\"completion\":\"2\"}\n")?;
    Ok(())
}

async fn read_base(rig: &FleetFixture, run: &RunId) -> anyhow::Result<v1::Tree> {
    let subject = Subject::new(run, FactKey::Spec).to_string();
    match rig.bus.get_fact(&subject).await?.map(|record| record.fact.body) {
        Some(FactBody::Spec(spec)) => spec.base.and_then(|base| base.tree).context("a base"),
        _ => bail!("the log holds no {subject}"),
    }
}

async fn measure_transfer(rig: &FleetFixture, tree: &v1::Tree) -> anyhow::Result<[Duration; 2]> {
    let cache = FileCache::open(&rig.directory_path().join("transfer"), 1 << 30)?;
    let began = Instant::now();
    cache.fetch_tree(&rig.store, tree).await?;
    let cold = began.elapsed();
    let began = Instant::now();
    cache.fetch_tree(&rig.store, tree).await?;
    Ok([cold, began.elapsed()])
}

async fn publish_checkpoint(
    rig: &FleetFixture,
    run: &RunId,
    step: u32,
    tree: v1::Tree,
) -> anyhow::Result<()> {
    let checkpoint = v1::Checkpoint {
        run: run.to_string(),
        step,
        content: v1::checkpoint::Content::Model.into(),
        tree: Some(tree),
        ..Default::default()
    };
    let subject = Subject::new(run, FactKey::Checkpoint { cycle: 0, step });
    rig.bus.publish_fact(&Fact { subject, body: FactBody::Checkpoint(checkpoint) }).await?;
    Ok(())
}

async fn await_eval(rig: &FleetFixture, run: &RunId, step: u32) -> anyhow::Result<()> {
    let place = FactKey::Eval { cycle: 0, step, suite: SUITE.parse()? };
    let subject = Subject::new(run, place).to_string();
    let began = Instant::now();
    while rig.bus.get_fact(&subject).await?.is_none() {
        if began.elapsed() > LIMIT {
            bail!("no {subject} within {LIMIT:?}");
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    tokio::time::sleep(ACK_DELAY).await;
    Ok(())
}

/// Converts a duration to milliseconds.
fn to_milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
