//! `flotilla run …`.

use std::{path::Path, process::ExitCode, sync::Arc};

use anyhow::{Context, bail};
use control::{Control, Files, Submitted, Watch, view};
use cycle::Run;
use futures::StreamExt;
use serde_json::json;
use wire::{RunId, v1};

use crate::{
    cli::{RunCommand, SteerArgs},
    fleet::FleetArgs,
    meter::Meter,
    output, progress,
};

use super::{FINDINGS, data, explain, reproduce};

pub(crate) async fn run(
    fleet: &FleetArgs,
    command: RunCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    if let RunCommand::Import { config, prompts, out } = &command {
        data::import(config, prompts.as_deref(), out.as_deref(), json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let control = fleet.control().await?;
    match command {
        RunCommand::Import { .. } => {}
        RunCommand::Submit { spec, watch } => {
            let Submitted { run, report } = submit_told(&control, &spec).await?;
            if json {
                output::print_json(&json!({ "run": run, "data": report }))?;
            } else {
                data::told(&report).iter().for_each(|line| output::say(line));
                output::print(run.as_str());
            }
            name_absent(&control, &run).await?;
            if watch {
                return follow(&control, &run, 0).await;
            }
        }
        RunCommand::Check { spec } => {
            let (yaml, files) = read(&spec).await?;
            let checked = control.check(&yaml, &files).await;
            let report = checked.with_context(|| format!("check {}", spec.display()))?;
            if json {
                output::print_json(&report)?;
            } else {
                data::told(&report).iter().for_each(|line| output::print(line));
            }
        }
        RunCommand::List => list(&control, json).await?,
        RunCommand::Show { run } => show(&control, &RunId::new(run)?, json).await?,
        RunCommand::Watch { run, after } => {
            let run = RunId::new(run)?;
            if json {
                return print_facts(&control, &run, after).await;
            }
            return follow(&control, &run, after).await;
        }
        RunCommand::Explain { run, cycle } => {
            let story = control.explain_run(&RunId::new(run)?, cycle).await?;
            if json {
                output::print_json(&story)?;
            } else {
                explain::story(&story);
            }
        }
        RunCommand::Diff { a, b } => {
            diff(&control, [RunId::new(a)?, RunId::new(b)?], json).await?;
        }
        RunCommand::Reproduce(args) => {
            return reproduce::reproduce(&control, &args, json).await;
        }
        RunCommand::Pause(args) => steer(&control, args, v1::control::Action::Pause).await?,
        RunCommand::Resume(args) => steer(&control, args, v1::control::Action::Resume).await?,
        RunCommand::Cancel(args) => steer(&control, args, v1::control::Action::Cancel).await?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn submit(control: &Control, spec: &Path) -> anyhow::Result<RunId> {
    Ok(submit_told(control, spec).await?.run)
}

/// A spec, and where the files it names are looked up: beside it.
async fn read(spec: &Path) -> anyhow::Result<(String, Files)> {
    let yaml = tokio::fs::read_to_string(spec).await;
    let yaml = yaml.with_context(|| format!("read {}", spec.display()))?;
    Ok((yaml, Files::Local(spec.parent().unwrap_or(Path::new("")).to_owned())))
}

async fn submit_told(control: &Control, spec: &Path) -> anyhow::Result<Submitted> {
    let (yaml, files) = read(spec).await?;
    let meter = Arc::new(Meter::new());
    let shown = meter.clone();
    let watch: Watch = Arc::new(move |transfer| {
        shown.show(transfer.doing, "bytes", transfer.bytes, transfer.total);
    });
    let submitted = control.submit_watched(&yaml, &files, &watch).await;
    meter.end();
    submitted.with_context(|| format!("submit {}", spec.display()))
}

/// A run from its spec to its good end.
pub(crate) async fn succeed(control: &Control, spec: &Path) -> anyhow::Result<Run> {
    let id = submit(control, spec).await?;
    let ended = progress::follow(control, &id, 0).await?;
    match &ended.done {
        Some(done) if done.status() == v1::done::Status::Succeeded => Ok(ended),
        Some(done) => bail!("run {id} ended otherwise than hoped: {} (A113)", done.message),
        None => bail!("run {id} has no end (A113)"),
    }
}

async fn steer(
    control: &Control,
    args: SteerArgs,
    action: v1::control::Action,
) -> anyhow::Result<()> {
    Ok(control.steer(&RunId::new(args.run)?, action, &args.reason).await?)
}

async fn follow(control: &Control, run: &RunId, after: u64) -> anyhow::Result<ExitCode> {
    let ended = progress::follow(control, run, after).await?;
    Ok(code(ended.done.as_ref()))
}

fn code(done: Option<&v1::Done>) -> ExitCode {
    match done.map(v1::Done::status) {
        Some(v1::done::Status::Succeeded) => ExitCode::SUCCESS,
        _ => ExitCode::from(FINDINGS),
    }
}

/// Says which roles a new run waits for: a misspelt pool would otherwise wait in silence.
pub(super) async fn name_absent(control: &Control, run: &RunId) -> anyhow::Result<()> {
    let spec = control.run(run).await?.spec;
    let mut needed = match spec.kind {
        Some(v1::spec::Kind::Raft(_)) => vec!["trainer", "generator", "verifier"],
        Some(v1::spec::Kind::Watched(_)) => Vec::new(),
        Some(v1::spec::Kind::Sft(_)) | None => vec!["trainer"],
    };
    if !spec.suites.is_empty() {
        needed.push("evaluator");
    }
    let agents = control.agents().await?;
    // Verifiers and evaluators serve every pool.
    let serves = |agent: &v1::AgentStatus, role: &str| {
        let here = agent.state() == v1::agent_status::State::Ready;
        let pool = agent.pool == spec.pool || matches!(role, "verifier" | "evaluator");
        here && pool && agent.roles.iter().any(|name| name == role)
    };
    for role in needed {
        if !agents.iter().any(|agent| serves(agent, role)) {
            let pool = &spec.pool;
            output::say(&format!("{run} waits: no {role} has joined pool {pool} yet"));
        }
    }
    Ok(())
}

/// One line a fact, as on the bus, until the run ends.
async fn print_facts(control: &Control, run: &RunId, after: u64) -> anyhow::Result<ExitCode> {
    let mut facts = control.watch_run(run, after).await?;
    let mut done = None;
    while let Some(record) = facts.next().await.transpose()? {
        let body: serde_json::Value = serde_json::from_slice(&record.fact.encode())?;
        output::print_json(&json!({
            "cursor": record.sequence,
            "time_ms": record.time_ms,
            "subject": record.fact.subject.to_string(),
            "author": record.author.as_ref().map(ToString::to_string),
            "fact": body,
        }))?;
        if let wire::Body::Done(ended) = record.fact.body {
            done = Some(ended);
        }
    }
    Ok(code(done.as_ref()))
}

fn state(run: &v1::Run) -> String {
    run.state().as_str_name().to_lowercase()
}

/// What two runs were asked differently, and their figures side by side.
async fn diff(control: &Control, ids: [RunId; 2], json: bool) -> anyhow::Result<()> {
    let [a, b] = &ids;
    let runs = [control.run(a).await?, control.run(b).await?];
    let spec = |run: &cycle::Run| -> anyhow::Result<serde_json::Value> {
        // Every two runs differ in these.
        let spec = v1::Spec { run: String::new(), submitted_at: None, ..run.spec.clone() };
        Ok(serde_json::to_value(spec)?)
    };
    let settings = explain::differences(&spec(&runs[0])?, &spec(&runs[1])?);
    let views = runs.each_ref().map(view);
    if json {
        let settings: Vec<_> =
            settings.iter().map(|(path, a, b)| json!({"setting": path, "a": a, "b": b})).collect();
        let cycles = views.each_ref().map(|run| &run.cycles_done);
        return output::print_json(&json!({"settings": settings, "a": cycles[0], "b": cycles[1]}));
    }
    if settings.is_empty() {
        output::print(&format!("{a} and {b} were asked the same"));
    } else {
        let rows = settings.into_iter().map(|(path, left, right)| [path, left, right]);
        output::print(&output::table(["setting", a.as_str(), b.as_str()], rows));
    }
    explain::figures(views.each_ref()).iter().for_each(|table| output::print(table));
    Ok(())
}

async fn list(control: &Control, json: bool) -> anyhow::Result<()> {
    let runs: Vec<v1::Run> = control.runs().await?.iter().map(view).collect();
    if json {
        return output::print_json(&runs);
    }
    let rows = runs.iter().map(|run| {
        let cycle = format!("{}/{}", run.cycle, run.cycles);
        let submitted = output::time(run.submitted_at.as_ref());
        [run.run.clone(), run.kind.clone(), state(run), cycle, submitted, run.message.clone()]
    });
    let headings = ["run", "kind", "state", ">cycle", "submitted", "message"];
    output::print(&output::table(headings, rows));
    Ok(())
}

async fn show(control: &Control, id: &RunId, json: bool) -> anyhow::Result<()> {
    let run = view(&control.run(id).await?);
    if json {
        return output::print_json(&run);
    }
    let message = if run.message.is_empty() { String::new() } else { format!(": {}", run.message) };
    output::print(&format!("{id}: {} run, {}{message}", run.kind, state(&run)));
    output::print(&format!(
        "seed {}, cycle {} of {}, phase {}",
        run.seed, run.cycle, run.cycles, run.phase
    ));
    output::print(&cycles_table(&run));
    for done in &run.cycles_done {
        verdicts_of(done).into_iter().chain(energy(done)).for_each(|line| output::print(&line));
    }
    if !run.checkpoints.is_empty() {
        output::print(&perplexities_table(&run));
    }
    for failure in &run.failures {
        let v1::Failure { kind, id, attempt, agent, message, .. } = failure;
        output::print(&format!("failure: {kind} {id}, try {attempt} on {agent}: {message}"));
        if !failure.log_tail.is_empty() {
            output::print(&failure.log_tail);
        }
    }
    Ok(())
}

/// The figures of a cycle that have no column, and what its gates made of them.
pub(crate) fn verdicts_of(done: &v1::CycleDone) -> Vec<String> {
    let cycle = done.cycle;
    let mut lines = Vec::new();
    if !done.pass_at.is_empty() {
        lines.push(format!("cycle {cycle}: {}", pass_at(&done.pass_at)));
    }
    for suite in &done.suites {
        let at = if suite.pass_at.is_empty() { "" } else { ", " };
        let (name, rate) = (&suite.suite, rate(suite.rate.as_ref()));
        lines.push(format!("cycle {cycle}: {name} {rate}{at}{}", pass_at(&suite.pass_at)));
    }
    for finding in &done.findings {
        let v1::cycle_done::Finding { gate, value, limit, .. } = finding;
        let then = match finding.then() {
            v1::gates::Then::RollBack => format!("back to cycle {}", done.best),
            v1::gates::Then::Stop => format!("the run ends; cycle {} was the best", done.best),
            v1::gates::Then::Tell | v1::gates::Then::Unspecified => "the run goes on".into(),
        };
        lines.push(match gate.as_str() {
            "patience" => format!("cycle {cycle}: {value} cycles without a better one; {then}"),
            _ => format!("cycle {cycle}: {gate} {value:.4} is past {limit:.4}; {then}"),
        });
    }
    lines
}

fn pass_at(all: &[v1::cycle_done::PassAt]) -> String {
    let percent = |share: f64| format!("{:.1}", share * 100.0);
    let each = all.iter().map(|at| {
        let [mean, low, high] = [at.mean, at.low, at.high].map(percent);
        format!("pass@{} {mean} % ({low} to {high})", at.k)
    });
    each.collect::<Vec<String>>().join(", ")
}

/// A pass rate with its standard error.
pub(crate) fn rate(rate: Option<&v1::cycle_done::Rate>) -> String {
    rate.map_or("-".into(), |rate| {
        format!("{:.1} % ± {:.1}", rate.mean * 100.0, rate.stderr * 100.0)
    })
}

/// What a kept sample of a cycle took, where agents could measure it.
fn energy(done: &v1::CycleDone) -> Option<String> {
    let v1::CycleDone { cycle, sampled, kept, joules, metered, .. } = *done;
    if metered == 0 || kept == 0 {
        return None;
    }
    let each = joules / f64::from(metered) * f64::from(sampled) / f64::from(kept);
    let of = if metered < sampled {
        format!(", by {metered} of {sampled} samples")
    } else {
        String::new()
    };
    Some(format!("cycle {cycle}: {each:.1} J for each kept sample{of}"))
}

/// Each checkpoint and what was measured of it.
pub(crate) fn perplexities_table(run: &v1::Run) -> String {
    let rows = run.checkpoints.iter().filter_map(|info| info.checkpoint.as_ref()).map(|c| {
        let of = |e: &&v1::Eval| (e.cycle, e.step) == (c.cycle, c.step);
        let eval = run.evals.iter().find(of);
        let perplexity =
            eval.map_or("-".into(), |e| format!("{:.4} ± {:.4}", e.perplexity, e.stderr));
        let bits = eval.map_or("-".into(), |e| format!("{:.4}", e.bits_per_byte));
        let loss = if c.step == 0 { "-".into() } else { format!("{:.4}", c.loss) };
        let path = c.tree.as_ref().map_or(String::new(), |tree| tree.path.clone());
        [c.cycle.to_string(), c.step.to_string(), loss, perplexity, bits, path]
    });
    output::table([">cycle", ">step", ">loss", ">perplexity", ">bits/byte", "in the store"], rows)
}

/// What each cycle came to; also the demo's last word.
pub(crate) fn cycles_table(run: &v1::Run) -> String {
    let rows = run.cycles_done.iter().map(|done| {
        let rate = rate(done.heldout.as_ref());
        let last = run.evals.iter().filter(|eval| eval.cycle == done.cycle).max_by_key(|e| e.step);
        let perplexity =
            last.map_or("-".into(), |e| format!("{:.4} ± {:.4}", e.perplexity, e.stderr));
        let agents: Vec<String> =
            done.samples_by_agent.iter().map(|(agent, n)| format!("{agent} {n}")).collect();
        let phases = [done.generate_s, done.verify_s, done.train_s, done.eval_s];
        let [generate, verify, train, evaluate] = phases.map(|s| format!("{s:.1}"));
        let kept = format!("{}/{}", done.kept, done.sampled);
        [
            done.cycle.to_string(),
            rate,
            perplexity,
            kept,
            generate,
            verify,
            train,
            evaluate,
            agents.join(", "),
        ]
    });
    let headings = [
        ">cycle",
        ">held-out pass rate",
        ">perplexity",
        ">kept",
        ">generate s",
        ">verify s",
        ">train s",
        ">eval s",
        "samples by agent",
    ];
    output::table(headings, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_sample_s_energy_is_that_of_all_that_were_drawn_for_it() {
        let done = v1::CycleDone {
            cycle: 1,
            sampled: 64,
            kept: 16,
            joules: 320.0,
            metered: 64,
            ..v1::CycleDone::default()
        };
        assert_eq!(energy(&done).unwrap(), "cycle 1: 20.0 J for each kept sample");
        let some = v1::CycleDone { joules: 160.0, metered: 32, ..done.clone() };
        let said = energy(&some).unwrap();
        assert_eq!(said, "cycle 1: 20.0 J for each kept sample, by 32 of 64 samples");
        assert_eq!(energy(&v1::CycleDone { metered: 0, ..done.clone() }), None);
        assert_eq!(energy(&v1::CycleDone { kept: 0, ..done }), None);
    }
}
