//! Measures `flotilla-bench raft`: the effect of selection, more cycles and early sampling on a
//! run.
//!
//! It runs the built-in tasks on real fleets of this machine. Rates depend only on the seeds; times
//! depend on the machine.

mod markdown;
pub(crate) mod run_result;

use std::{path::Path, process::ExitCode, time::Instant};

use anyhow::Context;
use cli::{
    demo_task::{BaseRunFiles, DigitCount, RaftRunFiles},
    fleet::{self, FleetProcess, FleetProcessOptions},
    output, run_to_success, signals,
    work_directory::WorkDirectory,
};
use control::FleetControl;
use cycle::Run;
use serde::Serialize;
use serde_json::json;
use wire::RunId;

use crate::{
    args::BenchArgs,
    conditions::{Conditions, ConditionsMeter},
    flotilla_program::find_flotilla,
};

use self::run_result::RunResult;

/// Maximum cycles of the harder task. The run ends earlier after [`PATIENCE`] cycles without
/// improvement.
const HARDER_CYCLES: u32 = 16;
/// Cycles without improvement after which the harder task ends.
const PATIENCE: u32 = 3;

struct SelectionVariant {
    name: &'static str,
    title: &'static str,
    selection: &'static str,
    more: &'static str,
}

/// The compared strategies. The first one is the default of a spec.
const SELECTION_VARIANTS: [SelectionVariant; 3] = [
    selection_variant("default", "RAFT, best of k (the default)", "{}", ""),
    selection_variant(
        "rest-em",
        "ReST-EM",
        "{ policy: rest_em, min_reward: 1.0 }",
        "from_base: true",
    ),
    selection_variant(
        "top-percent",
        "the best 50 %",
        "{ policy: top_percent, min_reward: 1.0 }",
        "",
    ),
];

const fn selection_variant(
    name: &'static str,
    title: &'static str,
    selection: &'static str,
    more: &'static str,
) -> SelectionVariant {
    SelectionVariant { name, title, selection, more }
}

#[derive(Debug, Serialize)]
struct RaftReport {
    #[serde(flatten)]
    conditions: Conditions,
    seeds: u32,
    policies: Vec<VariantRuns>,
    harder: RunResult,
    /// The runs with `staleness` 0 and 1.
    ahead: [RunResult; 2],
}

#[derive(Debug, Serialize)]
struct VariantRuns {
    name: &'static str,
    title: &'static str,
    courses: Vec<RunResult>,
}

pub(super) async fn bench_raft(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let directory = WorkDirectory::open_or_create(args.dir.as_deref(), "bench-raft")?;
    let report = match measure_raft(directory.as_path(), args).await {
        Ok(report) => report,
        Err(error) => {
            let kept = directory.keep_files();
            let context = format!("the bench failed; its logs are in {}", kept.display());
            return Err(error.context(context));
        }
    };
    if args.json {
        output::print_json(&json!(report))?;
    } else {
        output::print_text(&markdown::write_markdown(&report));
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the strategies, the harder task and the comparison of staleness.
async fn measure_raft(directory: &Path, args: &BenchArgs) -> anyhow::Result<RaftReport> {
    let meter = ConditionsMeter::start();
    let sharing = FleetProcessOptions {
        agents: "trainer,generator=2,verifier,evaluator=2".into(),
        threads: None,
        detached: false,
    };
    let at = directory.join("policies");
    let (policies, harder) = with_fleet(&at, &sharing, 6, async |control| {
        Ok((compare_variants(control, &at, args).await?, run_harder_task(control, &at).await?))
    })
    .await?;
    // One core each for the trainer and the generator, as on two boxes.
    let apart = FleetProcessOptions {
        agents: "trainer,generator,verifier,evaluator".into(),
        threads: Some(1),
        detached: false,
    };
    let at = directory.join("ahead");
    let ahead =
        with_fleet(&at, &apart, 4, async |control| compare_staleness(control, &at, args).await)
            .await?;
    Ok(RaftReport { conditions: meter.finish(), seeds: args.seeds, policies, harder, ahead })
}

pub(crate) async fn with_fleet<T>(
    directory: &Path,
    wanted: &FleetProcessOptions,
    agents: usize,
    work: impl AsyncFnOnce(&FleetControl) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let stop = signals::stop_token()?;
    let mut process = FleetProcess::start(&find_flotilla()?, directory, wanted).await?;
    let working = async { work(&fleet::wait_ready(directory, agents).await?).await };
    let outcome = tokio::select! {
        outcome = working => outcome,
        () = stop.cancelled() => Err(anyhow::anyhow!("stopped by a signal")),
        status = process.wait() => Err(anyhow::anyhow!("the fleet ended by itself ({status})")),
    };
    process.stop().await;
    outcome
}

async fn compare_variants(
    control: &FleetControl,
    directory: &Path,
    args: &BenchArgs,
) -> anyhow::Result<Vec<VariantRuns>> {
    let compared = |policy: &SelectionVariant| VariantRuns {
        name: policy.name,
        title: policy.title,
        courses: Vec::new(),
    };
    let mut all: Vec<VariantRuns> = SELECTION_VARIANTS.iter().map(compared).collect();
    for seed in 1..=u64::from(args.seeds) {
        let files = directory.join(format!("seed-{seed}"));
        let base =
            train_base(control, &files, BaseRunFiles { seed, digits: DigitCount::Two }).await?;
        for (policy, compared) in SELECTION_VARIANTS.iter().zip(&mut all) {
            let SelectionVariant { selection, more, .. } = *policy;
            let raft = RaftRunFiles {
                seed,
                base: &base,
                cycles: args.cycles,
                selection,
                extra_lines: more,
            };
            compared.courses.push(run_spec(control, &files, &raft).await?);
        }
    }
    Ok(all)
}

async fn run_harder_task(control: &FleetControl, directory: &Path) -> anyhow::Result<RunResult> {
    let files = directory.join("harder");
    let base =
        train_base(control, &files, BaseRunFiles { seed: 1, digits: DigitCount::Three }).await?;
    let more = format!("gates: {{ patience: {PATIENCE} }}\npass_at: [1, 2]");
    let raft = RaftRunFiles {
        seed: 1,
        base: &base,
        cycles: HARDER_CYCLES,
        selection: "{}",
        extra_lines: &more,
    };
    run_spec(control, &files, &raft).await
}

/// Runs the same spec with `staleness` 0 and 1. With 1, the next cycle samples while the current
/// one trains.
async fn compare_staleness(
    control: &FleetControl,
    directory: &Path,
    args: &BenchArgs,
) -> anyhow::Result<[RunResult; 2]> {
    let files = directory.join("seed-1");
    let base =
        train_base(control, &files, BaseRunFiles { seed: 1, digits: DigitCount::Two }).await?;
    let raft = RaftRunFiles {
        seed: 1,
        base: &base,
        cycles: args.cycles,
        selection: "{}",
        extra_lines: "",
    };
    let after = run_spec(control, &files, &raft).await?;
    let ahead = RaftRunFiles { extra_lines: "staleness: 1", ..raft };
    Ok([after, run_spec(control, &files, &ahead).await?])
}

async fn train_base(
    control: &FleetControl,
    files: &Path,
    base: BaseRunFiles,
) -> anyhow::Result<RunId> {
    base.write_files(files).context("write the task's files")?;
    Ok(run_to_success(control, &files.join("base.yaml")).await?.id)
}

async fn run_spec(
    control: &FleetControl,
    files: &Path,
    raft: &RaftRunFiles<'_>,
) -> anyhow::Result<RunResult> {
    raft.write_spec(files).context("write the task's files")?;
    let began = Instant::now();
    let run: Run = run_to_success(control, &files.join("raft.yaml")).await?;
    Ok(RunResult::from_run(&run, raft.seed, began.elapsed()))
}
