//! Verifiers in a fleet: programs judged, boxes that cannot, and verifiers that fail.

use std::{os::unix::fs::PermissionsExt, path::Path, time::Duration};

use e2e::{Files, Fleet, Sampling};
use serde_json::{Value, json};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(240);

const SMALL: Sampling = Sampling { prompts: 8, per_prompt: 2, max_new_tokens: 8, cycles: 1 };

/// A fleet with a base, and a run that is judged so and keeps everything that was.
fn start(verifier: &str) -> (Fleet, String) {
    start_with(None, verifier)
}

/// As `start`, where the box's owner said something in the agents' environment.
fn start_with(owner: Option<(String, String)>, verifier: &str) -> (Fleet, String) {
    let fleet = Fleet::up_with("trainer,generator,verifier,evaluator", &[], owner);
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(10, 0));
    fleet.finish(&base, LIMIT);
    let spec = files.raft(&base, SMALL);
    let text = std::fs::read_to_string(&spec).expect("the spec");
    let judged = text.replace(
        "verifier: { regex: { pattern: '[0-9]' } }",
        &format!("verifier: {verifier}\n  selection: {{ min_reward: 0 }}"),
    );
    assert_ne!(judged, text);
    std::fs::write(&spec, judged).expect("the spec");
    let prompt = |n: u32| {
        let fields = json!({
            "id": format!("p{n}"), "prompt": format!("def f{n}(x):\n    return {n}"),
            "entry_point": format!("f{n}"),
            "test": format!("def check(candidate):\n    assert candidate(1) == -{n} - 1\n"),
        });
        format!("{fields}\n")
    };
    std::fs::write(files.path("prompts.jsonl"), (0..8).map(prompt).collect::<String>())
        .expect("the prompts");
    std::fs::write(files.path("heldout.jsonl"), prompt(9)).expect("the prompts");
    let run = fleet.submit(&spec);
    (fleet, run)
}

/// Commands in the sandbox may read this directory.
fn owner_opens(directory: &Path) -> Option<(String, String)> {
    Some(("FLOTILLA_VERIFIER_PATH".to_owned(), directory.display().to_string()))
}

/// That executable may run outside the sandbox.
fn owner_allows(program: &Path) -> Option<(String, String)> {
    Some(("FLOTILLA_ALLOW_COMMAND".to_owned(), program.display().to_string()))
}

/// One that nobody of the sandbox is kept out of.
fn open_directory() -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).expect("its mode");
    directory
}

fn agent(fleet: &Fleet) -> Option<Value> {
    let listed = fleet.json(&["agents", "list"]).ok()?;
    let verifies = |agent: &&Value| {
        agent["roles"].as_array().is_some_and(|all| all.contains(&json!("verifier")))
    };
    listed.as_array()?.iter().find(verifies).cloned()
}

#[test]
fn programs_that_models_write_are_run_and_judged() {
    let (fleet, run) = start("{ python: {} }");
    let abilities = agent(&fleet).expect("a verifier")["abilities"].clone();
    let can = abilities.as_array().is_some_and(|all| all.contains(&json!("verifier:python")));
    if !can {
        eprintln!("skipped: no python that can be contained here");
        return;
    }
    let ended = fleet.finish(&run, LIMIT);
    let [_, cycle] = &ended["cyclesDone"].as_array().expect("cycles")[..] else {
        panic!("{ended:#}")
    };
    assert_eq!(cycle["sampled"], 16, "{cycle:#}");
    assert_eq!(cycle["train"]["samples"], 16, "judged, every one: {cycle:#}");
    fleet.audit_clean(&run);
}

#[test]
fn a_box_that_lacks_an_executable_says_so_and_goes_on_when_it_is_there() {
    let directory = open_directory();
    let grader = directory.path().join("grader");
    let (fleet, run) = start_with(
        owner_opens(directory.path()),
        &format!("{{ command: {{ argv: ['{}'] }} }}", grader.display()),
    );
    e2e::until("the verifier says what it lacks", LIMIT, || {
        let trouble = agent(&fleet)?["trouble"].as_str()?.to_owned();
        (trouble.contains("lacks the executable") && trouble.contains("no connected verifier"))
            .then_some(())
    });
    write_script(&grader, "cat >/dev/null; echo '{\"outcome\":\"pass\"}'");
    let ended = fleet.finish(&run, LIMIT);
    assert_eq!(ended["cyclesDone"][1]["train"]["mean"], 1.0, "{ended:#}");
    fleet.audit_clean(&run);
}

#[test]
fn a_verifier_that_always_fails_is_tried_again_and_its_errors_are_no_rewards() {
    let directory = open_directory();
    let (grader, calls) = (directory.path().join("grader"), directory.path().join("calls"));
    // It runs as nobody where the agent is root.
    std::fs::write(&calls, "").expect("a file");
    std::fs::set_permissions(&calls, PermissionsExt::from_mode(0o666)).expect("its mode");
    let script = format!("echo >>'{}'; cat >/dev/null; exit 3", calls.display());
    write_script(&grader, &script);
    let (fleet, run) = start_with(
        owner_allows(&grader),
        &format!("{{ command: {{ argv: ['{}'] }} }}", grader.display()),
    );
    let ended = e2e::until("the run ends", LIMIT, || {
        let shown = fleet.json(&["run", "show", &run]).ok()?;
        (shown["state"] == "FAILED").then_some(shown)
    });
    let said = ended.to_string();
    assert!(said.contains("the verifier failed on every sample"), "{ended:#}");
    let calls = std::fs::read_to_string(&calls).expect("it was called").lines().count();
    assert!(calls >= 32, "each of 16 samples twice: {calls}");
}

#[test]
fn a_command_that_nobody_allowed_is_not_run_and_the_run_says_what_its_owner_can_do() {
    let directory = open_directory();
    let (grader, ran) = (directory.path().join("grader"), directory.path().join("ran"));
    write_script(&grader, &format!("touch '{}'; echo '{{\"outcome\":\"pass\"}}'", ran.display()));
    let (fleet, _) = start(&format!("{{ command: {{ argv: ['{}'] }} }}", grader.display()));
    e2e::until("the verifier says what it lacks", LIMIT, || {
        let trouble = agent(&fleet)?["trouble"].as_str()?.to_owned();
        (trouble.contains("(V104)") && trouble.contains("no connected verifier")).then_some(())
    });
    assert!(!ran.exists());
}

#[test]
fn a_command_of_the_system_is_contained_and_reads_neither_keys_nor_the_agent() {
    let directory = open_directory();
    let secret = directory.path().join("key");
    std::fs::write(&secret, "secret").expect("a file");
    let fleet_knows = r#"cat >/dev/null; outcome=pass
        for own in /proc/[0-9]*; do grep -q "[a]gent-dir" $own/cmdline 2>/dev/null && outcome=fail; done
        cat "$1" >/dev/null 2>&1 && outcome=fail
        echo "{\"outcome\":\"$outcome\"}""#;
    let script = serde_json::to_string(fleet_knows).expect("a text");
    let argv = format!("[sh, -c, {script}, sh, '{}']", secret.display());
    let (fleet, run) = start(&format!("{{ command: {{ argv: {argv} }} }}"));
    let abilities = agent(&fleet).expect("a verifier")["abilities"].clone();
    if !abilities.as_array().is_some_and(|all| all.contains(&json!("verifier:command"))) {
        eprintln!("skipped: nothing can be contained here");
        return;
    }
    let ended = fleet.finish(&run, LIMIT);
    assert_eq!(ended["cyclesDone"][1]["train"]["mean"], 1.0, "{ended:#}");
    fleet.audit_clean(&run);
}

fn write_script(path: &Path, script: &str) {
    let whole = path.with_extension("new");
    std::fs::write(&whole, format!("#!/bin/sh\n{script}\n")).expect("a script");
    std::fs::set_permissions(&whole, PermissionsExt::from_mode(0o755)).expect("executable");
    std::fs::rename(&whole, path).expect("in its place");
}
