//! `flotilla bench raft`: what a selection policy, more cycles and sampling ahead do for a run, on
//! the built-in tasks and real fleets of this machine. Rates follow from the seeds, times do not.

mod course;
mod document;

use std::{path::Path, process::ExitCode, time::Instant};

use anyhow::Context;
use control::Control;
use cycle::Run;
use serde::Serialize;
use serde_json::json;
use wire::RunId;

use crate::{
    cli::BenchArgs,
    commands::succeed,
    directory::Directory,
    fleet::{self, FleetArgs, FleetProcess, Wanted},
    output, signals,
    sums::{Base, Digits, Raft},
};

use self::course::Course;

/// Cycles of the harder task at most: it ends by itself when no cycle was better for so many.
const HARDER_CYCLES: u32 = 16;
const PATIENCE: u32 = 3;

/// A policy, and what it is given besides samples.
struct Policy {
    name: &'static str,
    title: &'static str,
    selection: &'static str,
    more: &'static str,
}

/// The first is what a spec that says nothing gets.
const POLICIES: [Policy; 3] = [
    policy("default", "RAFT, best of k (the default)", "{}", ""),
    policy("rest-em", "ReST-EM", "{ policy: rest_em, min_reward: 1.0 }", "from_base: true"),
    policy("top-percent", "the best 50 %", "{ policy: top_percent, min_reward: 1.0 }", ""),
];

const fn policy(
    name: &'static str,
    title: &'static str,
    selection: &'static str,
    more: &'static str,
) -> Policy {
    Policy { name, title, selection, more }
}

#[derive(Debug, Serialize)]
struct Report {
    machine: String,
    release: bool,
    load_before: Vec<f64>,
    load_after: Vec<f64>,
    seeds: u32,
    policies: Vec<Compared>,
    harder: Course,
    /// Sampling with the newest checkpoint, and one ahead.
    ahead: [Course; 2],
    wall_s: f64,
}

/// The runs of a policy, one a seed.
#[derive(Debug, Serialize)]
struct Compared {
    name: &'static str,
    title: &'static str,
    courses: Vec<Course>,
}

pub(super) async fn bench(
    fleet: &FleetArgs,
    args: &BenchArgs,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let directory = Directory::choose(fleet.dir.as_deref(), "bench-raft")?;
    let report = match measure(directory.path(), args).await {
        Ok(report) => report,
        Err(error) => {
            let kept = directory.keep();
            let told = format!("the bench failed; its logs are in {}", kept.display());
            return Err(error.context(told));
        }
    };
    if as_json {
        output::print_json(&json!(report))?;
    } else {
        output::print(&document::write(&report));
    }
    Ok(ExitCode::SUCCESS)
}

async fn measure(directory: &Path, args: &BenchArgs) -> anyhow::Result<Report> {
    let (began, load_before) = (Instant::now(), super::load());
    let sharing = Wanted {
        agents: "trainer,generator=2,verifier,evaluator=2".into(),
        threads: None,
        outlives: false,
    };
    let at = directory.join("policies");
    let (policies, harder) = on_fleet(&at, &sharing, 6, async |control| {
        Ok((policies(control, &at, args).await?, harder(control, &at).await?))
    })
    .await?;
    // As two boxes would be: one trains, the other samples.
    let apart = Wanted {
        agents: "trainer,generator,verifier,evaluator".into(),
        threads: Some(1),
        outlives: false,
    };
    let at = directory.join("ahead");
    let ahead = on_fleet(&at, &apart, 4, async |control| ahead(control, &at, args).await).await?;
    Ok(Report {
        machine: super::engines::machine(),
        release: !cfg!(debug_assertions),
        load_before,
        load_after: super::load(),
        seeds: args.seeds,
        policies,
        harder,
        ahead,
        wall_s: began.elapsed().as_secs_f64(),
    })
}

/// Works with a fleet that is there for nothing else.
pub(super) async fn on_fleet<T>(
    directory: &Path,
    wanted: &Wanted,
    agents: usize,
    work: impl AsyncFnOnce(&Control) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let stop = signals::stop_token()?;
    let mut process = FleetProcess::start(directory, wanted).await?;
    let working = async { work(&fleet::ready(directory, agents).await?).await };
    let outcome = tokio::select! {
        outcome = working => outcome,
        () = stop.cancelled() => Err(anyhow::anyhow!("stopped by a signal")),
        status = process.wait() => Err(anyhow::anyhow!("the fleet ended by itself ({status})")),
    };
    process.stop().await;
    outcome
}

/// Each policy on the same bases, with the same samples a cycle.
async fn policies(
    control: &Control,
    directory: &Path,
    args: &BenchArgs,
) -> anyhow::Result<Vec<Compared>> {
    let compared =
        |policy: &Policy| Compared { name: policy.name, title: policy.title, courses: Vec::new() };
    let mut all: Vec<Compared> = POLICIES.iter().map(compared).collect();
    for seed in 1..=u64::from(args.seeds) {
        let files = directory.join(format!("seed-{seed}"));
        let base = base(control, &files, Base { seed, digits: Digits::Two }).await?;
        for (policy, compared) in POLICIES.iter().zip(&mut all) {
            let Policy { selection, more, .. } = *policy;
            let raft = Raft { seed, base: &base, cycles: args.cycles, selection, more };
            compared.courses.push(course(control, &files, &raft).await?);
        }
    }
    Ok(all)
}

/// Until cycles help no more.
async fn harder(control: &Control, directory: &Path) -> anyhow::Result<Course> {
    let files = directory.join("harder");
    let base = base(control, &files, Base { seed: 1, digits: Digits::Three }).await?;
    let more = format!("gates: {{ patience: {PATIENCE} }}\npass_at: [1, 2]");
    let raft = Raft { seed: 1, base: &base, cycles: HARDER_CYCLES, selection: "{}", more: &more };
    course(control, &files, &raft).await
}

/// The same run with each cycle after the other, and with the next one's samples drawn meanwhile.
async fn ahead(
    control: &Control,
    directory: &Path,
    args: &BenchArgs,
) -> anyhow::Result<[Course; 2]> {
    let files = directory.join("seed-1");
    let base = base(control, &files, Base { seed: 1, digits: Digits::Two }).await?;
    let raft = Raft { seed: 1, base: &base, cycles: args.cycles, selection: "{}", more: "" };
    let after = course(control, &files, &raft).await?;
    let ahead = Raft { more: "staleness: 1", ..raft };
    Ok([after, course(control, &files, &ahead).await?])
}

async fn base(control: &Control, files: &Path, base: Base) -> anyhow::Result<RunId> {
    base.write(files).context("write the task's files")?;
    Ok(succeed(control, &files.join("base.yaml")).await?.id)
}

async fn course(control: &Control, files: &Path, raft: &Raft<'_>) -> anyhow::Result<Course> {
    raft.write(files).context("write the task's files")?;
    let began = Instant::now();
    let run: Run = succeed(control, &files.join("raft.yaml")).await?;
    Ok(Course::of(&run, raft.seed, began.elapsed()))
}
