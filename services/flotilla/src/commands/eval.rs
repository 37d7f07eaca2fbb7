//! `flotilla eval …`.

use std::process::ExitCode;

use anyhow::Context;
use evaluator::{Format, Source};
use futures::StreamExt;
use serde_json::json;
use wire::{RunId, v1};

use crate::{
    cli::{EvalCommand, EvalFilterArgs, EvalLocalArgs},
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
        EvalCommand::Local(args) => local(args, json)?,
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
        ])
    });
    let headings =
        ["run", ">cycle", ">step", "suite", ">perplexity", ">bits/byte", ">tokens", "agent", "at"];
    output::print(&output::table(headings, rows));
    Ok(())
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

fn local(args: EvalLocalArgs, json: bool) -> anyhow::Result<()> {
    let lines = args.text.extension().is_some_and(|extension| extension == "jsonl");
    let source = Source {
        base: args.model,
        adapter: args.adapter,
        text: args.text,
        format: if lines { Format::Documents } else { Format::Text },
        n_ctx: args.n_ctx as usize,
        stride: args.stride as usize,
        chunks: args.chunks as usize,
    };
    let bar = indicatif::ProgressBar::new(0);
    let figures = evaluator::measure(&source, &args.device, |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    })
    .with_context(|| format!("measure {}", source.text.display()))?;
    bar.finish_and_clear();
    if json {
        return output::print_json(&json!({
            "perplexity": figures.perplexity,
            "stderr": figures.stderr,
            "mean_nll": figures.mean_nll,
            "bits_per_byte": figures.bits_per_byte,
            "tokens": figures.tokens,
            "chunks": figures.chunks,
            "engine": figures.engine,
        }));
    }
    output::print(&format!(
        "perplexity {:.4} ± {:.4}, {:.6} bits/byte, mean NLL {:.6} over {} tokens in {} chunks ({})",
        figures.perplexity,
        figures.stderr,
        figures.bits_per_byte,
        figures.mean_nll,
        figures.tokens,
        figures.chunks,
        figures.engine
    ));
    Ok(())
}
