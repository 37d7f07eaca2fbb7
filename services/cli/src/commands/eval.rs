//! `flotilla eval`: evaluation results of the fleet, and local measurements.

mod local;

use std::process::ExitCode;

use futures::StreamExt;
use wire::{RunId, v1};

use crate::{
    args::{EvalCommand, EvalFilterArgs},
    fleet::FleetArgs,
    output,
};

/// Runs a `flotilla eval` subcommand.
pub(crate) async fn run_eval_command(
    fleet: &FleetArgs,
    command: EvalCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    match command {
        EvalCommand::History(filter) => print_history(fleet, filter, json).await?,
        EvalCommand::Watch { filter, after } => watch_evals(fleet, filter, after, json).await?,
        EvalCommand::Local(args) => local::run_local_eval(args, json)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the run of a filter, if it has one.
fn parse_run_filter(filter: &EvalFilterArgs) -> anyhow::Result<Option<RunId>> {
    Ok(filter.run.as_deref().map(RunId::new).transpose()?)
}

/// Prints all past results.
async fn print_history(
    fleet: &FleetArgs,
    filter: EvalFilterArgs,
    json: bool,
) -> anyhow::Result<()> {
    let control = fleet.connect_control().await?;
    let run = parse_run_filter(&filter)?;
    if let Some(run) = &run {
        control.read_run_records(run).await?;
    }
    let evals = control.list_evals(run.as_ref(), &filter.suite).await?;
    if json {
        return output::print_json(&evals);
    }
    let rows = evals.iter().filter_map(|event| {
        let eval = event.eval.as_ref()?;
        Some([
            eval.run.clone(),
            eval.cycle.to_string(),
            eval.step.to_string(),
            eval.suite.clone(),
            format!("{:.4} ± {:.4}", eval.perplexity, eval.stderr),
            format!("{:.4}", eval.bits_per_byte),
            eval.tokens.to_string(),
            eval.agent.clone(),
            output::format_time(event.at.as_ref()),
            shootdown_text(eval),
        ])
    });
    let headings = [
        "run",
        ">cycle",
        ">step",
        "suite",
        ">perplexity",
        ">bits/byte",
        ">tokens",
        "agent",
        "at",
        ">?TLB/s, peak",
    ];
    output::print_text(&output::format_table(headings, rows));
    Ok(())
}

/// Returns the mean and peak rate of TLB shootdowns during a measurement, and whether there was a
/// storm.
fn shootdown_text(eval: &v1::Eval) -> String {
    eval.shootdowns.as_ref().map_or("-".into(), |seen| {
        let storm = if seen.stormed { " STORM" } else { "" };
        format!("{:.0}, {:.0}{storm}", seen.mean_per_s, seen.peak_per_s)
    })
}

/// Prints past results after a log position, then new ones.
async fn watch_evals(
    fleet: &FleetArgs,
    filter: EvalFilterArgs,
    after: u64,
    json: bool,
) -> anyhow::Result<()> {
    let control = fleet.connect_control().await?;
    let run = parse_run_filter(&filter)?;
    let mut evals = std::pin::pin!(control.watch_evals(run.as_ref(), filter.suite, after));
    while let Some(event) = evals.next().await.transpose()? {
        if json {
            output::print_json(&event)?;
        } else if let Some(eval) = &event.eval {
            output::print_line(&format_eval(eval));
        }
    }
    Ok(())
}

/// Returns a result on one line.
fn format_eval(eval: &v1::Eval) -> String {
    let v1::Eval { run, cycle, step, suite, perplexity, stderr, bits_per_byte, agent, .. } = eval;
    format!(
        "{run} cycle {cycle} step {step} {suite}: perplexity {perplexity:.4} ± {stderr:.4}, \
         {bits_per_byte:.4} bits/byte ({agent})"
    )
}
