//! Runs that wait in the queue of their pool, and sweeps.

use std::{path::PathBuf, time::Duration};

use e2e::{Fleet, Sampling, SpecFiles, wait_until};
use rustix::process::Signal;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(240);

/// Writes the spec of an SFT run with these lines at its end.
fn write_queued_spec(files: &SpecFiles, name: &str, steps: u32, lines: &str) -> PathBuf {
    let spec = std::fs::read_to_string(files.write_sft_spec(steps, 0)).expect("a spec");
    let path = files.path(&format!("{name}.yaml"));
    let spec = format!("{}{lines}\n", spec.replace("name: base", &format!("name: {name}")));
    std::fs::write(&path, spec).expect("a file");
    path
}

/// Returns a time of this machine's day, such as `22:30`, some hours from now.
fn hours_from_now(hours: u32) -> String {
    let mut date = std::process::Command::new("date");
    let output = date.args(["-d", &format!("{hours} hours"), "+%H:%M"]).output();
    let output = output.expect("coreutils' date");
    String::from_utf8(output.stdout).expect("digits").trim().to_owned()
}

fn show(fleet: &Fleet, run: &str) -> Value {
    fleet.run_json(&["run", "show", run]).expect("a run")
}

/// Returns the sequence of the fact of a run that matches.
fn cursor_of(fleet: &Fleet, run: &str, matches: impl Fn(&Value) -> bool) -> u64 {
    let facts = fleet.read_facts(run);
    let found = facts.iter().find(|fact| matches(fact));
    found.and_then(|fact| fact["cursor"].as_u64()).unwrap_or_else(|| panic!("{facts:#?}"))
}

fn is_order(fact: &Value) -> bool {
    fact["subject"].as_str().is_some_and(|it| it.contains(".order."))
}

fn order_cursor(fleet: &Fleet, run: &str) -> u64 {
    cursor_of(fleet, run, is_order)
}

fn end_cursor(fleet: &Fleet, run: &str) -> u64 {
    let is_end = |fact: &Value| fact["subject"].as_str().is_some_and(|it| it.ends_with(".done"));
    cursor_of(fleet, run, is_end)
}

#[test]
fn queued_runs_work_one_after_another_and_a_killed_coordinator_changes_nothing() {
    let fleet = Fleet::start_open("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let submit = |name: &str, steps: u32, queue: &str| {
        fleet.submit(&write_queued_spec(&files, name, steps, &format!("queue: {queue}")))
    };
    // The first run works until the trainer goes on.
    fleet.signal("trainer-1", Signal::STOP);
    let first = submit("first", 20, "{ priority: 9 }");
    wait_until("the first run works", LIMIT, || {
        (show(&fleet, &first)["state"] == "RUNNING").then_some(())
    });
    let low = submit("low", 20, "{}");
    let high = submit("high", 20, "{ priority: 5 }");
    let opens = hours_from_now(3);
    let window = format!("{{ from: '{opens}', until: '{}' }}", hours_from_now(5));
    let night = submit("night", 20, &window);
    let now = submit("now", 20, "{ priority: -1 }");

    let listed = fleet.run(&["run", "queue"]);
    let order: Vec<&str> =
        listed.stdout.lines().skip(1).filter_map(|line| line.split_whitespace().nth(2)).collect();
    assert_eq!(order, [&first, &high, &low, &now, &night], "{}", listed.stdout);
    let waiting = show(&fleet, &low);
    assert_eq!(
        (waiting["state"].as_str(), waiting["queuePlace"].as_u64()),
        (Some("QUEUED"), Some(3))
    );
    assert_eq!(waiting["message"], format!("waits in the queue behind {high}"));
    assert_eq!(show(&fleet, &night)["message"], format!("waits until {opens}"));
    fleet.kill("coordinator");
    // A user takes a run out of the queue, which works at once, beside the others.
    fleet.run(&["run", "pause", &now, "--reason", "lunch"]).assert_success();
    assert_eq!(show(&fleet, &now)["state"], "PAUSED");
    fleet.run(&["run", "resume", &now]).assert_success();
    assert_eq!(show(&fleet, &now)["state"], "RUNNING");
    fleet.signal("trainer-1", Signal::CONT);
    for run in [&first, &high, &low, &now] {
        fleet.await_success(run, LIMIT);
        fleet.assert_clean_audit(run);
    }
    assert!(order_cursor(&fleet, &high) > end_cursor(&fleet, &first), "priority 9 comes first");
    assert!(order_cursor(&fleet, &low) > end_cursor(&fleet, &high), "then priority 5");
    assert_eq!(show(&fleet, &night)["state"], "QUEUED");
    fleet.run(&["run", "cancel", &night]).assert_success();
    fleet.await_state(&night, "CANCELLED", LIMIT);
    assert!(!fleet.read_facts(&night).iter().any(is_order));
}

#[test]
fn a_higher_priority_pauses_a_run_which_continues_afterwards() {
    let fleet = Fleet::start_open("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    // The first run works until the trainer goes on.
    fleet.signal("trainer-1", Signal::STOP);
    let low = fleet.submit(&write_queued_spec(&files, "low", 40, "queue: {}"));
    fleet.await_fact(&low, is_order);
    let high = fleet.submit(&write_queued_spec(&files, "high", 10, "queue: { priority: 1 }"));
    wait_until("the first run is paused", LIMIT, || {
        (show(&fleet, &low)["state"] == "QUEUED").then_some(())
    });
    fleet.signal("trainer-1", Signal::CONT);
    fleet.await_success(&high, LIMIT);
    fleet.await_success(&low, LIMIT);
    fleet.assert_clean_audit(&low);
    let paused = cursor_of(&fleet, &low, |fact| fact["fact"]["action"] == "PAUSE");
    let reason = fleet.read_facts(&low);
    let reason = reason.iter().find(|fact| fact["fact"]["action"] == "PAUSE").expect("a pause");
    assert_eq!(reason["fact"]["reason"], format!("{high} goes first in the queue"));
    assert!(paused < order_cursor(&fleet, &high));
}

#[test]
fn a_sweep_runs_all_combinations_and_compares_them() {
    let fleet = Fleet::start_open("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 0));
    fleet.await_success(&base, LIMIT);
    let sampling = Sampling { prompts: 8, per_prompt: 4, max_new_tokens: 16, cycles: 1 };
    let path = files.write_raft_spec(&base, sampling);
    let spec = std::fs::read_to_string(&path).expect("a spec");
    let sweep = "sweep: { learning_rate: [0.001, 0.0005], seed: [1, 2] }\n";
    std::fs::write(&path, format!("{spec}{sweep}")).expect("a file");
    let file = path.display().to_string();

    let checked = fleet.run(&["run", "check", &file]);
    assert!(checked.stdout.contains("a sweep of 4 runs"), "{checked:?}");
    let submitted = fleet.run_json(&["run", "submit", &file]).expect("a sweep");
    let runs: Vec<String> = serde_json::from_value(submitted["runs"].clone()).expect("ids");
    assert_eq!(runs, ["raft-1", "raft-2", "raft-3", "raft-4"]);
    fleet.run(&["run", "cancel", &runs[3]]).assert_success();
    for run in &runs[..3] {
        fleet.await_success(run, LIMIT);
    }
    let report = fleet.run_json(&["run", "sweep", &runs[1]]).expect("a comparison");
    let rows = report["runs"].as_array().expect("rows");
    let settings = |row: &Value, key: &str| row["settings"][key].as_str().map(str::to_owned);
    let seeds: Vec<_> = rows.iter().filter_map(|row| settings(row, "seed")).collect();
    let rates: Vec<_> =
        rows.iter().filter_map(|row| settings(row, "raft.training.learning_rate")).collect();
    assert_eq!(
        (report["sweep"].as_str(), seeds),
        (Some("raft-1"), ["1", "2", "1", "2"].map(str::to_owned).to_vec())
    );
    assert_eq!(rates, ["0.001", "0.001", "0.0005", "0.0005"]);
    assert!(rows[..3].iter().all(|row| row["heldout"]["stderr"].is_number()), "{report:#}");
    assert!(rows[..3].iter().all(|row| row["wall_s"].as_f64() > Some(0.0)), "{report:#}");
    assert_eq!(rows[3]["state"], "cancelled");
    let best = report["best"].as_str().expect("a best run");
    let table = fleet.run(&["run", "sweep", "raft-1"]).stdout;
    assert!(
        table.contains(&format!("{best} *")) && table.contains("learning_rate 0.001"),
        "{table}"
    );
    println!("{table}");
    let diff = fleet.run_json(&["run", "diff", &runs[0], &runs[1]]).expect("a difference");
    assert_eq!(diff["settings"].as_array().map(Vec::len), Some(1), "{diff:#}");
    let other = fleet.run(&["run", "sweep", &base]);
    assert!(other.code == 1 && other.stderr.contains("part of no sweep (R107)"), "{other:?}");
    let again = fleet.run_json(&["run", "submit", &file]).expect("a sweep");
    let name = again["run"].as_str().expect("an id").to_owned();
    assert_eq!(fleet.run(&["run", "cancel", &name, "--sweep"]).code, 0);
    fleet.await_state("raft-8", "CANCELLED", LIMIT);
}
