//! `flotilla run`: submits, shows and controls runs.

use std::{path::Path, process::ExitCode};

use anyhow::Context;
use control::{
    FleetControl, RunError, SettingDifference, SubmittedRun, compare_settings, run_to_proto,
};
use futures::StreamExt;
use run_view::{cycle_findings, energy_line, failure_lines, remaining_text};
use serde_json::{Value, json};
use wire::{RunId, v1};

use crate::{
    args::{ForkArgs, GlobalArgs, RunCommand, SteerArgs},
    exit_codes, output, run_progress,
    run_submission::{submit_run, write_schema},
};

use super::{
    cycle_figures::{cycles_table, perplexities_table},
    data, explain, forecast, import, new_run, reproduce, samples, sweep,
};

pub(crate) async fn handle_run_command(
    flags: &GlobalArgs,
    command: RunCommand,
) -> anyhow::Result<ExitCode> {
    let done = |()| ExitCode::SUCCESS;
    match &command {
        RunCommand::Import(args) => return import::import_config(args, flags.json).map(done),
        RunCommand::Schema { out, watch, generate } => {
            let schema = match (watch, generate) {
                (true, _) => spec::watch_spec_schema(),
                (false, true) => spec::generation_spec_schema(),
                (false, false) => spec::run_spec_schema(),
            };
            return print_schema(out.as_deref(), &schema, flags.json).map(done);
        }
        RunCommand::Check(args) => return forecast::check_spec(flags, args).await.map(done),
        _ => {}
    }
    if let RunCommand::New(args) = command {
        return new_run::start_new_run(flags, args).await;
    }
    let control = flags.fleet.connect_control().await?;
    match command {
        RunCommand::Check(_)
        | RunCommand::Import(_)
        | RunCommand::New(_)
        | RunCommand::Schema { .. } => {}
        RunCommand::Submit { spec, watch } => {
            return submit_spec(&control, &spec, watch, flags.json).await;
        }
        RunCommand::Fork(args) => return fork_run(&control, args, flags.json).await,
        RunCommand::List => print_runs(&control, flags.json).await?,
        RunCommand::Queue => sweep::print_queue(&control, flags.json).await?,
        RunCommand::Sweep { run } => {
            sweep::print_sweep(&control, &RunId::new(run)?, flags.json).await?;
        }
        RunCommand::Show { run } => print_run(&control, &RunId::new(run)?, flags.json).await?,
        RunCommand::Watch { run, after } => {
            let run = RunId::new(run)?;
            if flags.json {
                return print_facts(&control, &run, after).await;
            }
            report_missing_roles(&control, &run).await?;
            return follow_run(&control, &run, after).await;
        }
        RunCommand::Explain { run, cycle, forecast: with_forecast, price } => {
            let run = RunId::new(run)?;
            let story = control.explain_run(&run, cycle).await?;
            if with_forecast {
                forecast::print_explained(&control, (&run, &story), price, flags.json).await?;
            } else {
                output::print_json_or(flags.json, &story, || explain::print_run_report(&story))?;
            }
        }
        RunCommand::Samples(args) => samples::print_samples(&control, args, flags.json).await?,
        RunCommand::Diff { a, b } => {
            print_diff(&control, [RunId::new(a)?, RunId::new(b)?], flags.json).await?;
        }
        RunCommand::Reproduce(args) => {
            return reproduce::reproduce_checkpoint(&control, &args, flags.json).await;
        }
        RunCommand::Pause(args) => {
            control_run(&control, args, v1::control::Action::Pause, flags.json).await?;
        }
        RunCommand::Resume(args) => {
            control_run(&control, args, v1::control::Action::Resume, flags.json).await?;
        }
        RunCommand::Cancel(args) => {
            control_run(&control, args, v1::control::Action::Cancel, flags.json).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn print_schema(out: Option<&Path>, schema: &Value, json: bool) -> anyhow::Result<()> {
    let text = format!("{schema:#}\n");
    let Some(file) = out else {
        return output::print_json_or(json, schema, || output::print_text(text.trim_end()));
    };
    write_schema(file, &text)?;
    output::print_json_or(json, &json!({ "schema": file }), || {
        output::print_message(&format!("wrote {}", file.display()));
    })
}

async fn submit_spec(
    control: &FleetControl,
    spec: &Path,
    watch: bool,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let SubmittedRun { run, runs, report } = submit_run(control, spec).await?;
    let answer = json!({ "run": run, "runs": runs, "data": report });
    output::print_json_or(json, &answer, || {
        data::report_lines(&report).iter().for_each(|line| output::print_message(line));
        runs.iter().for_each(|run| output::print_line(run.as_str()));
    })?;
    if report.sweep_runs == 0 {
        return finish_submission(control, &run, watch).await;
    }
    report_missing_roles(control, &run).await?;
    output::print_message(&format!("`flotilla run sweep {run}` compares these runs"));
    if watch { follow_sweep(control, &runs, json).await } else { Ok(ExitCode::SUCCESS) }
}

/// Prints what a new run waits for, and follows it or names the command that does.
pub(super) async fn finish_submission(
    control: &FleetControl,
    run: &RunId,
    watch: bool,
) -> anyhow::Result<ExitCode> {
    report_missing_roles(control, run).await?;
    if watch {
        return follow_run(control, run, 0).await;
    }
    output::print_message(&format!("follow it: flotilla run watch {run}"));
    Ok(ExitCode::SUCCESS)
}

async fn fork_run(control: &FleetControl, args: ForkArgs, json: bool) -> anyhow::Result<ExitCode> {
    let ForkArgs { cycle: forked, settings, name, watch } = args;
    let (parent, cycle) = parse_forked_cycle(&forked)?;
    let run = control.fork_run(&parent, cycle, name.as_deref(), &settings, "").await?;
    output::print_json_or(json, &json!({ "run": run, "forked_from": forked }), || {
        output::print_line(run.as_str());
    })?;
    finish_submission(control, &run, watch).await
}

fn parse_forked_cycle(text: &str) -> anyhow::Result<(RunId, u32)> {
    let parts = text.split_once('@');
    let parsed = parts.and_then(|(run, cycle)| Some((RunId::new(run).ok()?, cycle.parse().ok()?)));
    parsed.with_context(|| format!("{text:?} is not RUN@CYCLE, such as raft-1@2 (R115)"))
}

async fn control_run(
    control: &FleetControl,
    args: SteerArgs,
    action: v1::control::Action,
    json: bool,
) -> anyhow::Result<()> {
    let run = RunId::new(args.run)?;
    if !args.sweep {
        let changed = steer_run(control, &run, action, &args.reason).await?;
        return report_control(&run, action, changed, &args.reason, json);
    }
    for run in control.list_sweep_runs(&run).await? {
        match steer_run(control, &run, action, &args.reason).await {
            Err(RunError::Ended { .. }) => {}
            changed => report_control(&run, action, changed?, &args.reason, json)?,
        }
    }
    Ok(())
}

/// Returns false if the run had the state already.
async fn steer_run(
    control: &FleetControl,
    run: &RunId,
    action: v1::control::Action,
    reason: &str,
) -> Result<bool, RunError> {
    let (action, reason) = (action.into(), reason.to_owned());
    let fact = v1::Control { action, reason, ..v1::Control::default() };
    control.control_run(run, fact).await
}

fn report_control(
    run: &RunId,
    action: v1::control::Action,
    changed: bool,
    reason: &str,
    json: bool,
) -> anyhow::Result<()> {
    use v1::control::Action;
    let (state, next) = match action {
        Action::Pause => ("paused", format!("; `flotilla run resume {run}` continues it")),
        Action::Cancel => ("cancelled", String::new()),
        Action::Resume | Action::Unspecified => ("running", String::new()),
    };
    if json {
        return output::print_json(
            &serde_json::json!({ "run": run.as_str(), "state": state, "changed": changed }),
        );
    }
    let already = match (changed, reason.is_empty()) {
        (true, _) => "",
        (false, true) => " already",
        (false, false) => " already, and the new reason was not recorded",
    };
    output::print_message(&format!("{run} is {state}{already}{next}"));
    Ok(())
}

/// Follows the runs of a sweep one after another, and compares them at the end.
async fn follow_sweep(
    control: &FleetControl,
    runs: &[RunId],
    json: bool,
) -> anyhow::Result<ExitCode> {
    let mut all_succeeded = true;
    for run in runs {
        let ended = run_progress::follow_run(control, run, 0).await?;
        all_succeeded &= has_succeeded(ended.done.as_ref());
    }
    if let Some(run) = runs.first() {
        sweep::print_sweep(control, run, json).await?;
    }
    Ok(exit_codes::findings_code(!all_succeeded))
}

async fn follow_run(control: &FleetControl, run: &RunId, after: u64) -> anyhow::Result<ExitCode> {
    let ended = run_progress::follow_run(control, run, after).await?;
    Ok(run_exit_code(ended.done.as_ref()))
}

fn run_exit_code(done: Option<&v1::Done>) -> ExitCode {
    exit_codes::findings_code(!has_succeeded(done))
}

fn has_succeeded(done: Option<&v1::Done>) -> bool {
    done.is_some_and(|done| done.status() == v1::done::Status::Succeeded)
}

/// So that a misspelt pool does not wait in silence.
pub(super) async fn report_missing_roles(
    control: &FleetControl,
    run: &RunId,
) -> anyhow::Result<()> {
    let v1::Run { message, ended_at, .. } = control.describe_run(run).await?;
    if ended_at.is_none() && !message.is_empty() {
        output::print_message(&format!("{run} {message}"));
    }
    Ok(())
}

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

fn state_text(run: &v1::Run) -> String {
    run.state().as_str_name().to_lowercase()
}

async fn print_diff(control: &FleetControl, ids: [RunId; 2], json: bool) -> anyhow::Result<()> {
    let [a, b] = ids;
    let runs = [control.get_run(&a).await?, control.get_run(&b).await?];
    let settings = compare_settings(&runs[0], &runs[1])?;
    let views = runs.each_ref().map(run_to_proto);
    if json {
        let cycles = views.each_ref().map(|run| &run.cycles_done);
        return output::print_json(&json!({"settings": settings, "a": cycles[0], "b": cycles[1]}));
    }
    difference_texts(settings, views.each_ref()).iter().for_each(|text| output::print_text(text));
    Ok(())
}

fn difference_texts(settings: Vec<SettingDifference>, [a, b]: [&v1::Run; 2]) -> Vec<String> {
    let mut texts = Vec::new();
    if settings.is_empty() {
        texts.push(format!("{} and {} have the same settings", a.run, b.run));
    } else {
        let rows = settings.into_iter().map(|it| [it.setting, it.a, it.b]);
        texts.push(output::fit_table(
            ["setting", a.run.as_str(), b.run.as_str()],
            rows,
            output::stdout_width(),
        ));
    }
    texts.extend(explain::comparison_tables([a, b]));
    texts
}

fn trial_text(run: &v1::Run) -> String {
    format!("trial of an objective on {}", run.trial_of)
}

async fn print_runs(control: &FleetControl, json: bool) -> anyhow::Result<()> {
    let runs = control.describe_runs().await?;
    if json {
        return output::print_json(&runs);
    }
    let rows = runs.iter().map(|run| {
        let cycle = match run.cycles {
            0 => "-".to_owned(),
            cycles => format!("{}/{cycles}", run.cycle),
        };
        let submitted = output::format_time(run.submitted_at.as_ref());
        let message = match &*run.message {
            "" if !run.trial_of.is_empty() => trial_text(run),
            message => message.to_owned(),
        };
        [run.run.clone(), run.kind.clone(), state_text(run), cycle, submitted, message]
    });
    let headings = ["run", "kind", "state", ">cycle", "submitted", "message"];
    output::print_list(headings, rows, "no runs yet; `flotilla run new` starts one");
    Ok(())
}

async fn print_run(control: &FleetControl, id: &RunId, json: bool) -> anyhow::Result<()> {
    let run = control.describe_run(id).await?;
    if json {
        return output::print_json(&run);
    }
    let message = if run.message.is_empty() { String::new() } else { format!(": {}", run.message) };
    output::print_line(&format!("{id}: {} run, {}{message}", run.kind, state_text(&run)));
    output::print_line(&format!(
        "seed {}, cycle {} of {}, phase {}",
        run.seed, run.cycle, run.cycles, run.phase
    ));
    if run.state() == v1::run::State::Running
        && let Ok(Some(left)) = control.forecast_remaining(id).await
    {
        output::print_line(&remaining_text(&left));
    }
    if !run.forked_from.is_empty() {
        output::print_line(&format!("continues {}", run.forked_from));
    }
    if !run.trial_of.is_empty() {
        output::print_line(&trial_text(&run));
    }
    output::print_text(&cycles_table(&run, output::stdout_width()));
    for done in &run.cycles_done {
        cycle_findings(done)
            .into_iter()
            .chain(energy_line(done))
            .for_each(|line| output::print_line(&line));
    }
    if !run.checkpoints.is_empty() {
        output::print_text(&perplexities_table(&run, output::stdout_width()));
    }
    failure_lines(&run.failures).iter().for_each(|line| output::print_wrapped(line));
    if let Some(failure) = run.failures.iter().rfind(|failure| !failure.log_tail.is_empty()) {
        output::print_line(&failure.log_tail);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let settings = compare_settings(&ours, &theirs).unwrap();
        let names: Vec<String> = settings.iter().map(|it| it.setting.clone()).collect();
        assert_eq!(names, ["name", "raft.verifier.regex.pattern"]);
        let views = [run_to_proto(&ours), run_to_proto(&theirs)];
        let texts = difference_texts(settings, views.each_ref());
        for text in &texts {
            assert_eq!(&output::escape_text(text), text, "there is nothing left to escape");
        }
        let lines: Vec<&str> = texts[0].lines().collect();
        assert_eq!(lines.len(), 2 + names.len(), "{}", texts[0]);
        assert!(lines[2].contains("\\u{1b}]0;owned\\u{7}\\u{202e}\\nseed  1  2"), "{}", texts[0]);
        assert!(lines[3].contains("\\u{1b}[2J\\u{9b}1;1H\\u{d}\\nr-1 and"), "{}", texts[0]);
    }
}
