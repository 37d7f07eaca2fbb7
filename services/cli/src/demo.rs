//! `flotilla demo`: a complete fleet on this machine, as separate processes, and a small model that
//! improves.
//!
//! The demo uses only what users have: `flotilla up`, two spec files and the log.

mod report;

use std::path::Path;

use anyhow::Context;
use control::FleetControl;
use wire::RunId;

use crate::{
    args::{DemoArgs, GlobalArgs},
    demo_task::{BaseRunFiles, DigitCount, RaftRunFiles},
    fleet::{self, FleetFile, FleetProcess, FleetProcessOptions},
    output,
    run_submission::run_to_success,
    signals, this_machine,
    work_directory::WorkDirectory,
};

const OTHER_AGENTS: usize = 4;

pub(crate) async fn run_demo(flags: &GlobalArgs, args: &DemoArgs) -> anyhow::Result<()> {
    let began = std::time::Instant::now();
    let stop = signals::stop_token()?;
    let directory = WorkDirectory::open_or_create(flags.fleet.dir.as_deref(), "demo")?;
    let wanted = FleetProcessOptions {
        agents: format!("trainer,generator={},verifier,evaluator=2", args.generators),
        threads: None,
        detached: args.keep,
    };
    let program = this_machine::this_program()?;
    let mut process = FleetProcess::start(&program, directory.as_path(), &wanted).await?;
    let outcome = tokio::select! {
        outcome = run_demo_runs(&directory, args) => outcome,
        () = stop.cancelled() => Err(anyhow::anyhow!("stopped by a signal (A108)")),
        status = process.wait() => {
            Err(anyhow::anyhow!("the fleet exited unexpectedly ({status}) (A106)"))
        }
    };
    let outcome = match outcome {
        Ok((control, runs)) => report::gather_report(&control, &runs, args.seed, began).await,
        Err(error) => Err(error),
    };
    if args.keep && outcome.is_ok() {
        process.detach_process();
    } else {
        process.stop().await;
    }
    let report = match outcome {
        Ok(report) => report,
        Err(error) => {
            let logs = directory.keep_files().join("logs");
            let what = if stop.is_cancelled() { "was stopped" } else { "failed" };
            let text = format!("the demo {what}; its logs are in {}", logs.display());
            return Err(error.context(text));
        }
    };
    output::print_json_or(flags.json, &report.json, || output::print_text(&report.tables))?;
    let kept = args.keep || flags.fleet.dir.is_some();
    let steps = report::next_steps(directory.as_path(), &report.runs, args.keep, kept);
    output::print_status_text(&steps);
    if kept {
        directory.keep_files();
    }
    Ok(())
}

/// Returns a line about the web page, which is there before the runs end.
fn describe_page(directory: &Path) -> anyhow::Result<Option<String>> {
    let file = FleetFile::read(directory)?;
    Ok(file.map(|file| format!("its web page is {}", file.describe_page(directory))))
}

async fn run_demo_runs(
    directory: &WorkDirectory,
    args: &DemoArgs,
) -> anyhow::Result<(FleetControl, [RunId; 2])> {
    let DemoArgs { seed, cycles, generators, .. } = *args;
    let control =
        fleet::wait_ready(directory.as_path(), generators as usize + OTHER_AGENTS).await?;
    if args.keep
        && let Some(line) = describe_page(directory.as_path())?
    {
        output::print_status_text(&line);
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_demo_tells_its_page_and_how_to_sign_in() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(describe_page(directory.path()).unwrap(), None);
        let text = r#"{"nats": "tls://a:1", "gateway": "127.0.0.1:2", "store": "file:///c",
            "identity": {"name": "admin", "key": "k", "jwt": "j", "bearer": "b", "ca": "c"}}"#;
        std::fs::write(FleetFile::path_in(directory.path()), text).unwrap();
        let line = describe_page(directory.path()).unwrap().unwrap();
        assert!(line.contains("https://127.0.0.1:2/ (accept its certificate; sign in"), "{line}");
    }
}
