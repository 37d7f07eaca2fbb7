//! `flotilla eval`: evaluation results of the fleet, and local measurements.

mod local;

use control::{FleetControl, HELDOUT_SUITE};
use cycle::Run;
use futures::StreamExt;
use run_view::rate_text;
use wire::{
    RunId,
    v1::{self, eval_event::Result as EvalResult},
};

use crate::{
    args::{EvalCommand, EvalFilterArgs, GlobalArgs},
    output,
};

pub(crate) async fn handle_evals(flags: &GlobalArgs, command: EvalCommand) -> anyhow::Result<()> {
    match command {
        EvalCommand::History(filter) => print_history(flags, filter).await?,
        EvalCommand::Watch { filter, after } => watch_evals(flags, filter, after).await?,
        EvalCommand::Local(args) => local::run_local_eval(args, flags.json).await?,
    }
    Ok(())
}

fn parse_run_filter(filter: &EvalFilterArgs) -> anyhow::Result<Option<RunId>> {
    Ok(filter.run.as_deref().map(RunId::new).transpose()?)
}

async fn print_history(flags: &GlobalArgs, filter: EvalFilterArgs) -> anyhow::Result<()> {
    let control = flags.fleet.connect_control().await?;
    let run = parse_run_filter(&filter)?;
    let of_run = find_run(&control, run.as_ref(), &filter.suite).await?;
    let evals = control.list_evals(run.as_ref(), &filter.suite).await?;
    if flags.json {
        return output::print_json(&evals);
    }
    if evals.is_empty() {
        output::print_message(&no_results_text(of_run.as_ref(), &filter.suite));
        return Ok(());
    }
    let headings = [
        "run",
        ">cycle",
        ">step",
        "suite",
        ">pass rate",
        ">perplexity",
        ">?~bits/byte",
        ">?~tokens",
        "?~agent",
        "~at",
        ">?~TLB shootdowns/s (peak)",
    ];
    output::print_table(headings, evals.iter().flat_map(history_rows));
    Ok(())
}

/// Returns the run, if one is named. Fails if it does not have the suite.
async fn find_run(
    control: &FleetControl,
    run: Option<&RunId>,
    suite: &str,
) -> anyhow::Result<Option<Run>> {
    let Some(run) = run else { return Ok(None) };
    control.require_suite(run, suite).await?;
    Ok(Some(control.get_run(run).await?))
}

fn no_results_text(run: Option<&Run>, suite: &str) -> String {
    let of = if suite.is_empty() { String::new() } else { format!(" of suite {suite}") };
    let Some(run) = run else {
        return format!("no results{of} yet; `flotilla eval watch` waits for them");
    };
    match run.done {
        Some(_) => format!("{} ended without results{of}", run.id),
        None => {
            format!("no results{of} yet; `flotilla eval watch {}` waits for them", run.id)
        }
    }
}

fn history_rows(event: &v1::EvalEvent) -> Vec<[String; 11]> {
    let at = output::format_time(event.at.as_ref());
    let none = || "-".to_owned();
    match &event.result {
        Some(EvalResult::Eval(eval)) => vec![[
            eval.run.clone(),
            eval.cycle.to_string(),
            eval.step.to_string(),
            eval.suite.clone(),
            none(),
            format!("{:.4} ± {:.4}", eval.perplexity, eval.stderr),
            format!("{:.4}", eval.bits_per_byte),
            eval.tokens.to_string(),
            eval.agent.clone(),
            at,
            shootdown_text(eval),
        ]],
        Some(EvalResult::PassRates(rates)) => {
            let v1::PassRates { run, cycle, step, .. } = rates;
            let row = |(suite, rate): (String, String)| {
                let (cycle, step, at) = (cycle.to_string(), step.to_string(), at.clone());
                let [a, b, c, d, e] = std::array::from_fn(|_| none());
                [run.clone(), cycle, step, suite, rate, a, b, c, d, at, e]
            };
            suite_rates(rates).into_iter().map(row).collect()
        }
        None => Vec::new(),
    }
}

/// The measured suites of prompts with their pass rates, the run's own first.
fn suite_rates(rates: &v1::PassRates) -> Vec<(String, String)> {
    let own = (HELDOUT_SUITE.to_owned(), rates.heldout.as_ref());
    let others =
        rates.suites.iter().map(|measured| (measured.suite.clone(), measured.rate.as_ref()));
    let all = [own].into_iter().chain(others);
    all.filter(|(_, rate)| rate.is_some()).map(|(suite, rate)| (suite, rate_text(rate))).collect()
}

fn shootdown_text(eval: &v1::Eval) -> String {
    eval.shootdowns.as_ref().map_or("-".into(), |seen| {
        let storm = if seen.stormed { " STORM" } else { "" };
        format!("{:.0} ({:.0}){storm}", seen.mean_per_s, seen.peak_per_s)
    })
}

async fn watch_evals(flags: &GlobalArgs, filter: EvalFilterArgs, after: u64) -> anyhow::Result<()> {
    let control = flags.fleet.connect_control().await?;
    let run = parse_run_filter(&filter)?;
    if let Some(run) = &run {
        control.require_suite(run, &filter.suite).await?;
    }
    let mut evals = std::pin::pin!(control.watch_evals(run.as_ref(), filter.suite, after));
    while let Some(event) = evals.next().await.transpose()? {
        if flags.json {
            output::print_json(&event)?;
        } else if let Some(result) = &event.result {
            format_result(result).iter().for_each(|line| output::print_line(line));
        }
    }
    Ok(())
}

fn format_result(result: &EvalResult) -> Vec<String> {
    match result {
        EvalResult::Eval(eval) => vec![format_eval(eval)],
        EvalResult::PassRates(rates) => {
            let v1::PassRates { run, cycle, step, .. } = rates;
            let line = |(suite, rate)| {
                format!("{run} cycle {cycle} step {step} {suite}: pass rate {rate}")
            };
            suite_rates(rates).into_iter().map(line).collect()
        }
    }
}

fn format_eval(eval: &v1::Eval) -> String {
    let v1::Eval { run, cycle, step, suite, perplexity, stderr, bits_per_byte, agent, .. } = eval;
    format!(
        "{run} cycle {cycle} step {step} {suite}: perplexity {perplexity:.4} ± {stderr:.4}, \
         {bits_per_byte:.4} bits/byte ({agent})"
    )
}
