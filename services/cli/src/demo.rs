//! `flotilla demo`: a complete fleet on this machine, as separate processes, and a small model that
//! improves.
//!
//! The demo uses only what users have: `flotilla up`, two spec files and the log.

mod report;

use std::process::ExitCode;

use anyhow::Context;
use control::FleetControl;
use wire::RunId;

use crate::{
    args::DemoArgs,
    commands::run_to_success,
    demo_task::{BaseRunFiles, DigitCount, RaftRunFiles},
    fleet::{self, FleetArgs, FleetProcess, FleetProcessOptions},
    output, signals,
    work_directory::WorkDirectory,
};

/// Number of agents besides generators: a trainer, a verifier and two evaluators.
const OTHER_AGENTS: usize = 4;

/// Starts a fleet, runs the demo's two runs and prints their report. Stops the fleet unless
/// `--keep` is set.
pub(crate) async fn run_demo(
    fleet: &FleetArgs,
    args: &DemoArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let began = std::time::Instant::now();
    let stop = signals::stop_token()?;
    let directory = WorkDirectory::open_or_create(fleet.dir.as_deref(), "demo")?;
    let wanted = FleetProcessOptions {
        agents: format!("trainer,generator={},verifier,evaluator=2", args.generators),
        threads: None,
        detached: args.keep,
    };
    let program = std::env::current_exe().context("find this program")?;
    let mut process = FleetProcess::start(&program, directory.as_path(), &wanted).await?;
    let told = tokio::select! {
        told = run_demo_runs(&directory, args) => told,
        () = stop.cancelled() => Err(anyhow::anyhow!("stopped by a signal (A108)")),
        status = process.wait() => {
            Err(anyhow::anyhow!("the fleet exited unexpectedly ({status}) (A106)"))
        }
    };
    let told = match told {
        Ok((control, runs)) => report::gather_report(&control, &runs, args.seed, began).await,
        Err(error) => Err(error),
    };
    if args.keep && told.is_ok() {
        process.detach_process();
    } else {
        process.stop().await;
    }
    let told = match told {
        Ok(told) => told,
        Err(error) => {
            let kept = directory.keep_files();
            return Err(
                error.context(format!("the demo failed; its logs are in {}", kept.display()))
            );
        }
    };
    output::print_json_or(json, &told.json, || output::print_text(&told.tables))?;
    let kept = args.keep || fleet.dir.is_some();
    let steps = report::next_steps(directory.as_path(), &told.runs, args.keep, kept);
    output::print_status_text(&steps);
    if kept {
        directory.keep_files();
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the two runs: a base model from scratch, then RAFT on it. Returns their ids.
async fn run_demo_runs(
    directory: &WorkDirectory,
    args: &DemoArgs,
) -> anyhow::Result<(FleetControl, [RunId; 2])> {
    let DemoArgs { seed, cycles, generators, .. } = *args;
    let control =
        fleet::wait_ready(directory.as_path(), generators as usize + OTHER_AGENTS).await?;
    let files = directory.as_path().join("demo");
    BaseRunFiles { seed, digits: DigitCount::Two }
        .write_files(&files)
        .context("write the demo's files")?;
    let base = run_to_success(&control, &files.join("base.yaml")).await?.id;
    let selection = "{ keep_per_prompt: 1, min_reward: 1.0 }";
    let raft = RaftRunFiles { seed, base: &base, cycles, selection, extra_lines: "" };
    raft.write_spec(&files).context("write the demo's files")?;
    let raft = run_to_success(&control, &files.join("raft.yaml")).await?.id;
    Ok((control, [base, raft]))
}
