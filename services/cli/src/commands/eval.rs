//! `flotilla eval`: evaluation results of the fleet, and local measurements.

mod local;

use futures::StreamExt;
use wire::{RunId, v1};

use crate::{
    args::{EvalCommand, EvalFilterArgs, GlobalArgs},
    output,
};

pub(crate) async fn handle_evals(flags: &GlobalArgs, command: EvalCommand) -> anyhow::Result<()> {
    match command {
        EvalCommand::History(filter) => print_history(flags, filter).await?,
        EvalCommand::Watch { filter, after } => watch_evals(flags, filter, after).await?,
        EvalCommand::Local(args) => local::run_local_eval(args, flags.json)?,
    }
    Ok(())
}

fn parse_run_filter(filter: &EvalFilterArgs) -> anyhow::Result<Option<RunId>> {
    Ok(filter.run.as_deref().map(RunId::new).transpose()?)
}

async fn print_history(flags: &GlobalArgs, filter: EvalFilterArgs) -> anyhow::Result<()> {
    let control = flags.fleet.connect_control().await?;
    let run = parse_run_filter(&filter)?;
    if let Some(run) = &run {
        control.read_run_records(run).await?;
    }
    let evals = control.list_evals(run.as_ref(), &filter.suite).await?;
    if flags.json {
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
    output::print_table(headings, rows);
    Ok(())
}

fn shootdown_text(eval: &v1::Eval) -> String {
    eval.shootdowns.as_ref().map_or("-".into(), |seen| {
        let storm = if seen.stormed { " STORM" } else { "" };
        format!("{:.0}, {:.0}{storm}", seen.mean_per_s, seen.peak_per_s)
    })
}

async fn watch_evals(flags: &GlobalArgs, filter: EvalFilterArgs, after: u64) -> anyhow::Result<()> {
    let control = flags.fleet.connect_control().await?;
    let run = parse_run_filter(&filter)?;
    let mut evals = std::pin::pin!(control.watch_evals(run.as_ref(), filter.suite, after));
    while let Some(event) = evals.next().await.transpose()? {
        if flags.json {
            output::print_json(&event)?;
        } else if let Some(eval) = &event.eval {
            output::print_line(&format_eval(eval));
        }
    }
    Ok(())
}

fn format_eval(eval: &v1::Eval) -> String {
    let v1::Eval { run, cycle, step, suite, perplexity, stderr, bits_per_byte, agent, .. } = eval;
    format!(
        "{run} cycle {cycle} step {step} {suite}: perplexity {perplexity:.4} ± {stderr:.4}, \
         {bits_per_byte:.4} bits/byte ({agent})"
    )
}
