//! `flotilla demo`: a complete fleet on this machine, as separate processes, and a small model that
//! improves.
//!
//! The demo uses only what users have: `flotilla up`, two spec files and the log.

mod feedback_loop;
mod report;

use std::path::Path;

use anyhow::Context;
use control::FleetControl;
use wire::RunId;

use self::feedback_loop::{LoopReport, run_feedback_loop};
use crate::{
    args::{DemoArgs, GlobalArgs},
    commands::open,
    demo_task::{BaseRunFiles, DigitCount, LoopFiles, RaftRunFiles},
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
    let server = if args.learn_loop { ",server" } else { "" };
    let wanted = FleetProcessOptions {
        agents: format!("trainer,generator={},verifier,evaluator=2{server}", args.generators),
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
        Ok((control, DemoRuns::Raft(runs))) => {
            report::gather_report(&control, &runs, args.seed, began).await
        }
        Ok((control, DemoRuns::Loop(base, done))) => {
            report::gather_loop_report(&control, base, &done, args.seed, began).await
        }
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

/// Prints the address of the web page, which shows the runs while they work.
async fn print_page(directory: &Path) -> anyhow::Result<()> {
    if let Some(file) = FleetFile::read(directory)? {
        let page = open::describe_page(directory, &file).await;
        output::print_status_text(&format!("its web page is {page}"));
    }
    Ok(())
}

/// The runs of the demo.
enum DemoRuns {
    /// The base, and RAFT on it.
    Raft([RunId; 2]),
    /// The base, and what its users taught it.
    Loop(RunId, LoopReport),
}

async fn run_demo_runs(
    directory: &WorkDirectory,
    args: &DemoArgs,
) -> anyhow::Result<(FleetControl, DemoRuns)> {
    let DemoArgs { seed, cycles, generators, learn_loop, .. } = *args;
    let agents = generators as usize + OTHER_AGENTS + usize::from(learn_loop);
    let control = fleet::wait_ready(directory.as_path(), agents).await?;
    if args.keep || output::stderr_is_terminal() {
        print_page(directory.as_path()).await?;
    }
    let files = directory.as_path().join("demo");
    BaseRunFiles { seed, digits: DigitCount::Two }
        .write_files(&files)
        .context("write the demo's files")?;
    let base = run_to_success(&control, &files.join("base.yaml")).await?.id;
    if learn_loop {
        let loop_files = LoopFiles { directory: files, seed, cycles };
        let done = run_feedback_loop(&control, directory.as_path(), &loop_files, &base).await?;
        return Ok((control, DemoRuns::Loop(base, done)));
    }
    let selection = "{ keep_per_prompt: 1, min_reward: 1.0 }";
    let raft = RaftRunFiles { seed, base: &base, cycles, selection, extra_lines: "" };
    raft.write_spec(&files).context("write the demo's files")?;
    let raft = run_to_success(&control, &files.join("raft.yaml")).await?.id;
    Ok((control, DemoRuns::Raft([base, raft])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_gets_the_page_and_how_to_sign_in_but_no_code() {
        let directory = tempfile::tempdir().unwrap();
        let text = r#"{"nats": "tls://a:1", "gateway": "127.0.0.1:2", "store": "file:///c",
            "identity": {"name": "admin", "key": "k", "jwt": "j", "bearer": "b", "ca": "c"}}"#;
        std::fs::write(FleetFile::path_in(directory.path()), text).unwrap();
        let file = FleetFile::read(directory.path()).unwrap().unwrap();
        let line = file.describe_page(directory.path());
        assert!(line.starts_with("http://127.0.0.1:2/ (flotilla open --dir "), "{line}");
        // Elsewhere, and for programs, the fleet's certificate protects the bearer.
        assert_eq!(file.api_url(), "https://127.0.0.1:2/");
        let lan = FleetFile { gateway: "192.168.1.2:2".into(), ..file };
        assert_eq!(lan.page_url(), "https://192.168.1.2:2/");
    }
}
