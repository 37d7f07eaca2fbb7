//! `flotilla demo`: a whole fleet on this machine, as separate processes, and a small
//! model that gets better.
//!
//! Everything goes the ways a user's own runs go: `flotilla up`, two spec files, the log.

mod report;

use std::process::ExitCode;

use anyhow::Context;
use control::Control;
use wire::RunId;

use crate::{
    cli::DemoArgs,
    commands::succeed,
    directory::Directory,
    fleet::{self, FleetArgs, FleetProcess, Wanted},
    output, signals,
    sums::{Base, Digits, Raft},
};

/// Beside generators: a trainer, a verifier and two evaluators.
const OTHERS: usize = 4;

pub(crate) async fn demo(
    fleet: &FleetArgs,
    args: &DemoArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let began = std::time::Instant::now();
    let stop = signals::stop_token()?;
    let directory = Directory::choose(fleet.dir.as_deref(), "demo")?;
    let wanted = Wanted {
        agents: format!("trainer,generator={},verifier,evaluator=2", args.generators),
        threads: None,
        outlives: args.keep,
    };
    let mut process = FleetProcess::start(directory.path(), &wanted).await?;
    let told = tokio::select! {
        told = learn(&directory, args) => told,
        () = stop.cancelled() => Err(anyhow::anyhow!("stopped by a signal (A108)")),
        status = process.wait() => Err(anyhow::anyhow!("the fleet ended by itself ({status}) (A106)")),
    };
    let told = match told {
        Ok((control, runs)) => report::gather(&control, &runs, args.seed, began).await,
        Err(error) => Err(error),
    };
    if args.keep && told.is_ok() {
        process.leave();
    } else {
        process.stop().await;
    }
    let told = match told {
        Ok(told) => told,
        Err(error) => {
            let kept = directory.keep();
            return Err(
                error.context(format!("the demo failed; its logs are in {}", kept.display()))
            );
        }
    };
    if json {
        output::print_json(&told.json)?;
    } else {
        output::print(&told.tables);
    }
    let kept = args.keep || fleet.dir.is_some();
    output::say(&report::hints(directory.path(), &told.runs, args.keep, kept));
    if kept {
        directory.keep();
    }
    Ok(ExitCode::SUCCESS)
}

/// The two runs: a base from scratch, then RAFT on it.
async fn learn(directory: &Directory, args: &DemoArgs) -> anyhow::Result<(Control, [RunId; 2])> {
    let DemoArgs { seed, cycles, generators, .. } = *args;
    let control = fleet::ready(directory.path(), generators as usize + OTHERS).await?;
    let files = directory.path().join("demo");
    Base { seed, digits: Digits::Two }.write(&files).context("write the demo's files")?;
    let base = succeed(&control, &files.join("base.yaml")).await?.id;
    let selection = "{ keep_per_prompt: 1, min_reward: 1.0 }";
    let raft = Raft { seed, base: &base, cycles, selection, more: "" };
    raft.write(&files).context("write the demo's files")?;
    let raft = succeed(&control, &files.join("raft.yaml")).await?.id;
    Ok((control, [base, raft]))
}
