//! `flotilla demo`: a whole fleet on this machine, as separate processes, and a small
//! model that gets better.
//!
//! Everything goes the ways a user's own runs go: `flotilla up`, two spec files, the log.

mod fleet;
mod report;
mod specs;
mod task;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, bail};
use control::Control;
use wire::RunId;

use crate::{cli::DemoArgs, commands::submit, fleet::FleetArgs, output, progress, signals};

use self::fleet::DemoFleet;

pub(crate) async fn demo(
    fleet: &FleetArgs,
    args: &DemoArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let began = std::time::Instant::now();
    let stop = signals::stop_token()?;
    let directory = Directory::choose(fleet)?;
    let mut demo_fleet = DemoFleet::start(&directory.path, args).await?;
    let told = tokio::select! {
        told = learn(&directory, args) => told,
        () = stop.cancelled() => Err(anyhow::anyhow!("stopped by a signal")),
        status = demo_fleet.wait() => Err(anyhow::anyhow!("the fleet ended by itself ({status})")),
    };
    let told = match told {
        Ok((control, runs)) => report::gather(&control, &runs, args.seed, began).await,
        Err(error) => Err(error),
    };
    if args.keep && told.is_ok() {
        demo_fleet.leave();
    } else {
        demo_fleet.stop().await;
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
    output::say(&report::hints(&directory.path, &told.runs, args.keep, kept));
    if kept {
        directory.keep();
    }
    Ok(ExitCode::SUCCESS)
}

/// The two runs: a base from scratch, then RAFT on it.
async fn learn(directory: &Directory, args: &DemoArgs) -> anyhow::Result<(Control, [RunId; 2])> {
    let at = FleetArgs { dir: Some(directory.path.clone()), ..FleetArgs::default() };
    let control = fleet::ready(&at, args.generators).await?;
    let files = directory.path.join("demo");
    specs::write_base(&files, args.seed).context("write the demo's files")?;
    let base = run(&control, &files.join("base.yaml")).await?;
    specs::write_raft(&files, args, &base).context("write the demo's files")?;
    let raft = run(&control, &files.join("raft.yaml")).await?;
    Ok((control, [base, raft]))
}

async fn run(control: &Control, spec: &std::path::Path) -> anyhow::Result<RunId> {
    let id = submit(control, spec).await?;
    let ended = progress::follow(control, &id, 0).await?;
    match &ended.done {
        Some(done) if done.status() == wire::v1::done::Status::Succeeded => Ok(id),
        Some(done) => bail!("run {id} ended otherwise than hoped: {}", done.message),
        None => bail!("run {id} has no end"),
    }
}

/// Where the demo lives: the user's directory, or one that goes away with it.
struct Directory {
    path: PathBuf,
    temporary: bool,
}

impl Directory {
    fn choose(fleet: &FleetArgs) -> anyhow::Result<Self> {
        let (path, temporary) = match &fleet.dir {
            Some(path) => (path.clone(), false),
            None => {
                let name = format!("flotilla-demo-{}", std::process::id());
                (std::env::temp_dir().join(name), true)
            }
        };
        std::fs::create_dir_all(&path)
            .and_then(|()| path.canonicalize())
            .map(|path| Self { path, temporary })
            .with_context(|| format!("use {} for the demo", path.display()))
    }

    fn keep(mut self) -> PathBuf {
        self.temporary = false;
        self.path.clone()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if self.temporary {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
