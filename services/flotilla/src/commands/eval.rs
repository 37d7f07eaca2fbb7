//! `flotilla eval …`.

mod local;

use std::process::ExitCode;

use futures::StreamExt;
use wire::{RunId, v1};

use crate::{
    cli::{EvalCommand, EvalFilterArgs},
    fleet::FleetArgs,
    output,
};

pub(crate) async fn eval(
    fleet: &FleetArgs,
    command: EvalCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    match command {
        EvalCommand::History(filter) => history(fleet, filter, json).await?,
        EvalCommand::Watch { filter, after } => watch(fleet, filter, after, json).await?,
        EvalCommand::Local(args) => local::local(args, json)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn run_of(filter: &EvalFilterArgs) -> anyhow::Result<Option<RunId>> {
    Ok(filter.run.as_deref().map(RunId::new).transpose()?)
}

async fn history(fleet: &FleetArgs, filter: EvalFilterArgs, json: bool) -> anyhow::Result<()> {
    let control = fleet.control().await?;
    let run = run_of(&filter)?;
    if let Some(run) = &run {
        control.records(run).await?;
    }
    let evals = control.evals(run.as_ref(), &filter.suite).await?;
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
            output::time(event.at.as_ref()),
            shootdowns(eval),
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
    output::print(&output::table(headings, rows));
    Ok(())
}

/// Interrupts of the box while it was measured: their mean and peak, and whether they stormed.
fn shootdowns(eval: &v1::Eval) -> String {
    eval.shootdowns.as_ref().map_or("-".into(), |seen| {
        let storm = if seen.stormed { " STORM" } else { "" };
        format!("{:.0}, {:.0}{storm}", seen.mean_per_s, seen.peak_per_s)
    })
}

async fn watch(
    fleet: &FleetArgs,
    filter: EvalFilterArgs,
    after: u64,
    json: bool,
) -> anyhow::Result<()> {
    let control = fleet.control().await?;
    let run = run_of(&filter)?;
    let mut evals = std::pin::pin!(control.watch_evals(run.as_ref(), filter.suite, after));
    while let Some(event) = evals.next().await.transpose()? {
        if json {
            output::print_json(&event)?;
        } else if let Some(eval) = &event.eval {
            output::print(&line(eval));
        }
    }
    Ok(())
}

fn line(eval: &v1::Eval) -> String {
    let v1::Eval { run, cycle, step, suite, perplexity, stderr, bits_per_byte, agent, .. } = eval;
    format!(
        "{run} cycle {cycle} step {step} {suite}: perplexity {perplexity:.4} ± {stderr:.4}, \
         {bits_per_byte:.4} bits/byte ({agent})"
    )
}
