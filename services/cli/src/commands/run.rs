//! `flotilla run`: submits, shows and controls runs.

use std::{path::Path, process::ExitCode, sync::Arc};

use anyhow::{Context, bail};
use control::{FleetControl, SpecFiles, SubmittedRun, TransferCallback, run_to_proto};
use cycle::Run;
use futures::StreamExt;
use serde_json::json;
use wire::{RunId, v1};

use crate::{
    args::{RunCommand, SteerArgs},
    fleet::FleetArgs,
    output,
    progress_meter::ProgressMeter,
    run_progress,
};

use super::{
    EXIT_FINDINGS,
    cycle_figures::{cycle_findings, cycles_table, energy_line, perplexities_table},
    data, explain, reproduce,
};

/// Runs a `flotilla run` subcommand.
pub(crate) async fn handle_run_command(
    fleet: &FleetArgs,
    command: RunCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    if let RunCommand::Import { config, prompts, out } = &command {
        data::import_config(config, prompts.as_deref(), out.as_deref(), json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let control = fleet.connect_control().await?;
    match command {
        RunCommand::Import { .. } => {}
        RunCommand::Submit { spec, watch } => {
            let SubmittedRun { run, report } = submit_with_report(&control, &spec).await?;
            output::print_json_or(json, &json!({ "run": run, "data": report }), || {
                data::report_lines(&report).iter().for_each(|line| output::print_message(line));
                output::print_line(run.as_str());
            })?;
            report_missing_roles(&control, &run).await?;
            if watch {
                return follow_run(&control, &run, 0).await;
            }
        }
        RunCommand::Check { spec } => {
            let (yaml, files) = read_spec(&spec).await?;
            let checked = control.check_spec(&yaml, &files).await;
            let report = checked.with_context(|| format!("check {}", spec.display()))?;
            output::print_json_or(json, &report, || {
                data::report_lines(&report).iter().for_each(|line| output::print_line(line));
            })?;
        }
        RunCommand::List => print_runs(&control, json).await?,
        RunCommand::Show { run } => print_run(&control, &RunId::new(run)?, json).await?,
        RunCommand::Watch { run, after } => {
            let run = RunId::new(run)?;
            if json {
                return print_facts(&control, &run, after).await;
            }
            return follow_run(&control, &run, after).await;
        }
        RunCommand::Explain { run, cycle } => {
            let story = control.explain_run(&RunId::new(run)?, cycle).await?;
            output::print_json_or(json, &story, || explain::print_run_report(&story))?;
        }
        RunCommand::Diff { a, b } => {
            print_diff(&control, [RunId::new(a)?, RunId::new(b)?], json).await?;
        }
        RunCommand::Reproduce(args) => {
            return reproduce::reproduce_checkpoint(&control, &args, json).await;
        }
        RunCommand::Pause(args) => control_run(&control, args, v1::control::Action::Pause).await?,
        RunCommand::Resume(args) => {
            control_run(&control, args, v1::control::Action::Resume).await?;
        }
        RunCommand::Cancel(args) => {
            control_run(&control, args, v1::control::Action::Cancel).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Submits a run and returns its id.
pub(crate) async fn submit_run(control: &FleetControl, spec: &Path) -> anyhow::Result<RunId> {
    Ok(submit_with_report(control, spec).await?.run)
}

/// Reads a spec; the files it names are searched beside it.
async fn read_spec(spec: &Path) -> anyhow::Result<(String, SpecFiles)> {
    let yaml = tokio::fs::read_to_string(spec).await;
    let yaml = yaml.with_context(|| format!("read {}", spec.display()))?;
    Ok((yaml, SpecFiles::Local(spec.parent().unwrap_or(Path::new("")).to_owned())))
}

/// Submits a run with a progress meter, and returns the report about its files too.
async fn submit_with_report(control: &FleetControl, spec: &Path) -> anyhow::Result<SubmittedRun> {
    let (yaml, files) = read_spec(spec).await?;
    let meter = Arc::new(ProgressMeter::new());
    let shown = meter.clone();
    let watch: TransferCallback = Arc::new(move |transfer| {
        shown.show_progress(transfer.activity, "bytes", transfer.bytes, transfer.total);
    });
    let submitted = control.submit_with_progress(&yaml, &files, &watch).await;
    meter.finish_bar();
    submitted.with_context(|| format!("submit {}", spec.display()))
}

/// Submits a run, follows it to its end and returns it.
///
/// # Errors
/// If the run does not succeed.
pub async fn run_to_success(control: &FleetControl, spec: &Path) -> anyhow::Result<Run> {
    let id = submit_run(control, spec).await?;
    let ended = run_progress::follow_run(control, &id, 0).await?;
    match &ended.done {
        Some(done) if done.status() == v1::done::Status::Succeeded => Ok(ended),
        Some(done) => bail!("run {id} ended unexpectedly: {} (A113)", done.message),
        None => bail!("run {id} has not ended (A113)"),
    }
}

/// Pauses, resumes or cancels a run.
async fn control_run(
    control: &FleetControl,
    args: SteerArgs,
    action: v1::control::Action,
) -> anyhow::Result<()> {
    Ok(control.control_run(&RunId::new(args.run)?, action, &args.reason).await?)
}

/// Follows a run to its end and returns its exit code.
async fn follow_run(control: &FleetControl, run: &RunId, after: u64) -> anyhow::Result<ExitCode> {
    let ended = run_progress::follow_run(control, run, after).await?;
    Ok(run_exit_code(ended.done.as_ref()))
}

/// Returns the exit code of a finished run: 0 if it succeeded, otherwise `EXIT_FINDINGS`.
fn run_exit_code(done: Option<&v1::Done>) -> ExitCode {
    match done.map(v1::Done::status) {
        Some(v1::done::Status::Succeeded) => ExitCode::SUCCESS,
        _ => ExitCode::from(EXIT_FINDINGS),
    }
}

/// Prints the roles that a new run waits for, so that a misspelt pool does not wait in silence.
pub(super) async fn report_missing_roles(
    control: &FleetControl,
    run: &RunId,
) -> anyhow::Result<()> {
    let spec = control.get_run(run).await?.spec;
    let mut needed = match spec.kind {
        Some(v1::spec::Kind::Raft(_)) => vec!["trainer", "generator", "verifier"],
        Some(v1::spec::Kind::Watched(_)) => Vec::new(),
        Some(v1::spec::Kind::Sft(_)) | None => vec!["trainer"],
    };
    if !spec.suites.is_empty() {
        needed.push("evaluator");
    }
    let agents = control.list_agents().await?;
    // Verifiers and evaluators serve all pools.
    let serves = |agent: &v1::AgentStatus, role: &str| {
        let here = agent.state() == v1::agent_status::State::Ready;
        let pool = agent.pool == spec.pool || matches!(role, "verifier" | "evaluator");
        here && pool && agent.roles.iter().any(|name| name == role)
    };
    for role in needed {
        if !agents.iter().any(|agent| serves(agent, role)) {
            let pool = &spec.pool;
            output::print_message(&format!(
                "{run} is waiting: pool {pool} has no {role}; start one with `flotilla agent`"
            ));
        }
    }
    Ok(())
}

/// Prints the facts of a run as JSON lines until it ends.
async fn print_facts(control: &FleetControl, run: &RunId, after: u64) -> anyhow::Result<ExitCode> {
    let mut facts = control.watch_run(run, after).await?;
    let mut done = None;
    while let Some(record) = facts.next().await.transpose()? {
        let body: serde_json::Value = serde_json::from_slice(&record.fact.to_json())?;
        output::print_json(&json!({
            "cursor": record.sequence,
            "time_ms": record.time_ms,
            "subject": record.fact.subject.to_string(),
            "author": record.author.as_ref().map(ToString::to_string),
            "fact": body,
        }))?;
        if let wire::FactBody::Done(ended) = record.fact.body {
            done = Some(ended);
        }
    }
    Ok(run_exit_code(done.as_ref()))
}

/// Returns the state of a run as a word.
fn state_text(run: &v1::Run) -> String {
    run.state().as_str_name().to_lowercase()
}

/// Prints the settings of two runs that differ, and their results side by side.
async fn print_diff(control: &FleetControl, ids: [RunId; 2], json: bool) -> anyhow::Result<()> {
    let [a, b] = ids;
    let runs = [control.get_run(&a).await?, control.get_run(&b).await?];
    let settings = settings_apart([&runs[0], &runs[1]])?;
    let views = runs.each_ref().map(run_to_proto);
    if json {
        let settings: Vec<_> =
            settings.iter().map(|(path, a, b)| json!({"setting": path, "a": a, "b": b})).collect();
        let cycles = views.each_ref().map(|run| &run.cycles_done);
        return output::print_json(&json!({"settings": settings, "a": cycles[0], "b": cycles[1]}));
    }
    told_apart(settings, views.each_ref()).iter().for_each(|text| output::print_text(text));
    Ok(())
}

fn settings_apart([a, b]: [&cycle::Run; 2]) -> anyhow::Result<Vec<(String, String, String)>> {
    let spec = |run: &cycle::Run| {
        // The id and the time differ between any two runs.
        let spec = v1::Spec { run: String::new(), submitted_at: None, ..run.spec.clone() };
        serde_json::to_value(spec)
    };
    Ok(explain::spec_differences(&spec(a)?, &spec(b)?))
}

/// Lays out what `run diff` prints for people.
fn told_apart(settings: Vec<(String, String, String)>, [a, b]: [&v1::Run; 2]) -> Vec<String> {
    let mut texts = Vec::new();
    if settings.is_empty() {
        texts.push(format!("{} and {} have the same settings", a.run, b.run));
    } else {
        let rows = settings.into_iter().map(|(path, left, right)| [path, left, right]);
        texts.push(output::format_table(["setting", a.run.as_str(), b.run.as_str()], rows));
    }
    texts.extend(explain::comparison_tables([a, b]));
    texts
}

/// Prints all runs.
async fn print_runs(control: &FleetControl, json: bool) -> anyhow::Result<()> {
    let runs: Vec<v1::Run> = control.list_runs().await?.iter().map(run_to_proto).collect();
    if json {
        return output::print_json(&runs);
    }
    let rows = runs.iter().map(|run| {
        let cycle = format!("{}/{}", run.cycle, run.cycles);
        let submitted = output::format_time(run.submitted_at.as_ref());
        [run.run.clone(), run.kind.clone(), state_text(run), cycle, submitted, run.message.clone()]
    });
    let headings = ["run", "kind", "state", ">cycle", "submitted", "message"];
    output::print_text(&output::format_table(headings, rows));
    Ok(())
}

/// Prints a run with its cycles, checkpoints and failures.
async fn print_run(control: &FleetControl, id: &RunId, json: bool) -> anyhow::Result<()> {
    let run = run_to_proto(&control.get_run(id).await?);
    if json {
        return output::print_json(&run);
    }
    let message = if run.message.is_empty() { String::new() } else { format!(": {}", run.message) };
    output::print_line(&format!("{id}: {} run, {}{message}", run.kind, state_text(&run)));
    output::print_line(&format!(
        "seed {}, cycle {} of {}, phase {}",
        run.seed, run.cycle, run.cycles, run.phase
    ));
    output::print_text(&cycles_table(&run));
    for done in &run.cycles_done {
        cycle_findings(done)
            .into_iter()
            .chain(energy_line(done))
            .for_each(|line| output::print_line(&line));
    }
    if !run.checkpoints.is_empty() {
        output::print_text(&perplexities_table(&run));
    }
    for failure in &run.failures {
        let v1::Failure { kind, id, attempt, agent, message, .. } = failure;
        output::print_line(&format!("failure: {kind} {id}, try {attempt} on {agent}: {message}"));
        if !failure.log_tail.is_empty() {
            output::print_line(&failure.log_tail);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run whose spec is another member's.
    fn started(id: &str, name: &str, pattern: &str) -> cycle::Run {
        let regex = v1::verifier::Regex { pattern: pattern.into() };
        let verifier = v1::Verifier { how: Some(v1::verifier::How::Regex(regex)) };
        let raft = v1::spec::Raft { verifier: Some(verifier), ..Default::default() };
        let spec = v1::Spec {
            run: id.into(),
            name: name.into(),
            kind: Some(v1::spec::Kind::Raft(raft)),
            ..v1::Spec::default()
        };
        let subject = wire::Subject::new(&RunId::new(id).unwrap(), wire::FactKey::Spec);
        let fact = wire::Fact { subject, body: wire::FactBody::Spec(spec) };
        cycle::Run::start(&wire::Record { sequence: 1, time_ms: 1, author: None, fact }).unwrap()
    }

    #[test]
    fn a_hostile_spec_steers_no_terminal_and_forges_no_setting() {
        let ours = started("r-1", "sums", "[0-9]+");
        let theirs = started(
            "r-2",
            "\u{1b}]0;owned\u{7}\u{202e}\nseed  1  2",
            "\u{1b}[2J\u{9b}1;1H\r\nr-1 and r-2 were asked the same",
        );
        let settings = settings_apart([&ours, &theirs]).unwrap();
        let names: Vec<String> = settings.iter().map(|(name, ..)| name.clone()).collect();
        assert_eq!(names, ["name", "raft.verifier.regex.pattern"]);
        let views = [run_to_proto(&ours), run_to_proto(&theirs)];
        let told = told_apart(settings, views.each_ref());
        for text in &told {
            assert_eq!(&output::escape_text(text), text, "there is nothing left to escape");
        }
        let lines: Vec<&str> = told[0].lines().collect();
        assert_eq!(lines.len(), 2 + names.len(), "{}", told[0]);
        assert!(lines[2].contains("\\u{1b}]0;owned\\u{7}\\u{202e}\\nseed  1  2"), "{}", told[0]);
        assert!(lines[3].contains("\\u{1b}[2J\\u{9b}1;1H\\u{d}\\nr-1 and"), "{}", told[0]);
    }

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
        assert_eq!(energy_line(&done).unwrap(), "cycle 1: 20.0 J per kept sample");
        let some = v1::CycleDone { joules: 160.0, metered: 32, ..done.clone() };
        let said = energy_line(&some).unwrap();
        assert_eq!(said, "cycle 1: 20.0 J per kept sample, measured on 32 of 64 samples");
        assert_eq!(energy_line(&v1::CycleDone { metered: 0, ..done.clone() }), None);
        assert_eq!(energy_line(&v1::CycleDone { kept: 0, ..done }), None);
    }
}
