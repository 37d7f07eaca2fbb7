//! From a checkpoint's fact to the process that evaluates it: a real bus, a real agent,
//! a model of the demo's size whose files the agent has fetched before.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use control::Files;
use engine::{Device, Model, Shape, write_scratch};
use store::Cache;
use wire::{Body, Fact, Place, RunId, Subject, v1};

use super::{Figure, processes, rig::Rig};
use crate::output;

/// Checkpoints measured, after one that fetches the model.
const CHECKPOINTS: u32 = 20;

const LIMIT_MS: f64 = 50.0;

/// From a fact to the child, and from the child to its eval.
const LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);

/// An agent that has just written its eval still acknowledges the job.
const SETTLE: Duration = Duration::from_millis(100);

const SUITE: &str = "text";

const SPEC: &str = "\
name: bench
base: { model: model }
evals:
  - { name: text, text: text.txt, n_ctx: 64, chunks: 1 }
sft: { data: data.jsonl }
";

pub(super) async fn measure(rig: &Rig) -> anyhow::Result<[Figure; 3]> {
    output::say(&format!("start: {CHECKPOINTS} checkpoints to a running evaluator …"));
    let run = submit(rig).await?;
    let tree = base(rig, &run).await?;
    let [cold, warm] = transfer(rig, &tree).await?;
    let agent = rig.agent("bench-evaluator", "evaluator").await?;
    let mut taken = Vec::new();
    for step in 0..=CHECKPOINTS {
        let child = processes::next_worker(agent.pid, LIMIT);
        let began = Instant::now();
        publish(rig, &run, step, tree.clone()).await?;
        let seen = tokio::task::spawn_blocking(move || child.join()).await?;
        let seen = seen.map_err(|_| anyhow::anyhow!("the watching thread ended"))??;
        taken.push(milliseconds(seen.saturating_duration_since(began)));
        await_eval(rig, &run, step).await?;
    }
    agent.stop().await;
    let first = taken.remove(0);
    taken.sort_by(f64::total_cmp);
    let quantile = |percent: usize| taken[(taken.len() * percent).div_ceil(100).max(1) - 1];
    let how = format!("fact published to worker running, {CHECKPOINTS} times, files in the cache");
    Ok([
        Figure {
            name: "start: median",
            measured: quantile(50),
            unit: "ms",
            limit: Some(LIMIT_MS),
            how,
        },
        Figure {
            name: "start: p90",
            measured: quantile(90),
            unit: "ms",
            limit: None,
            how: format!("the first, which fetches the files, took {first:.1} ms"),
        },
        Figure {
            name: "start: transfer",
            measured: milliseconds(cold),
            unit: "ms",
            limit: None,
            how: format!(
                "that model into an empty cache; {:.2} ms when it is there",
                milliseconds(warm)
            ),
        },
    ])
}

async fn submit(rig: &Rig) -> anyhow::Result<RunId> {
    let files = rig.path().join("spec");
    write_files(&files).context("write a small model")?;
    Ok(rig.control().submit(SPEC, &Files::Local(files)).await?.run)
}

fn write_files(directory: &Path) -> anyhow::Result<()> {
    let model = directory.join("model");
    let config = write_scratch(&model, &Shape::default())?;
    Model::init(config, 1, &Device::Cpu)?.save(&model)?;
    std::fs::write(directory.join("text.txt"), "7+5=12 4+8+1=13 #132\n".repeat(16))?;
    std::fs::write(directory.join("data.jsonl"), "{\"prompt\":\"1+1=\",\"completion\":\"2\"}\n")?;
    Ok(())
}

async fn base(rig: &Rig, run: &RunId) -> anyhow::Result<v1::Tree> {
    let subject = Subject::new(run, Place::Spec).to_string();
    match rig.bus.get(&subject).await?.map(|record| record.fact.body) {
        Some(Body::Spec(spec)) => spec.base.and_then(|base| base.tree).context("a base"),
        _ => bail!("the log holds no {subject}"),
    }
}

/// How long the model takes into a new cache, and from it.
async fn transfer(rig: &Rig, tree: &v1::Tree) -> anyhow::Result<[Duration; 2]> {
    let cache = Cache::open(&rig.path().join("transfer"), 1 << 30)?;
    let began = Instant::now();
    cache.tree(&rig.store, tree).await?;
    let cold = began.elapsed();
    let began = Instant::now();
    cache.tree(&rig.store, tree).await?;
    Ok([cold, began.elapsed()])
}

async fn publish(rig: &Rig, run: &RunId, step: u32, tree: v1::Tree) -> anyhow::Result<()> {
    let checkpoint = v1::Checkpoint {
        run: run.to_string(),
        step,
        content: v1::checkpoint::Content::Model.into(),
        tree: Some(tree),
        ..Default::default()
    };
    let subject = Subject::new(run, Place::Checkpoint { cycle: 0, step });
    rig.bus.publish(&Fact { subject, body: Body::Checkpoint(checkpoint) }).await?;
    Ok(())
}

async fn await_eval(rig: &Rig, run: &RunId, step: u32) -> anyhow::Result<()> {
    let place = Place::Eval { cycle: 0, step, suite: SUITE.parse()? };
    let subject = Subject::new(run, place).to_string();
    let began = Instant::now();
    while rig.bus.get(&subject).await?.is_none() {
        if began.elapsed() > LIMIT {
            bail!("no {subject} within {LIMIT:?}");
        }
        tokio::time::sleep(POLL).await;
    }
    tokio::time::sleep(SETTLE).await;
    Ok(())
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
