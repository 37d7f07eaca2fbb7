//! The first minute with a fleet: a link to the page, the questions of `init`, and `status`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{fs, os::unix::fs::MetadataExt, path::Path, time::Duration};

use e2e::{Fleet, SpecFiles, Terminal, find_logs, run_flotilla, wait_until, write_script};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn open_gives_a_browser_the_link_in_a_file_of_its_user_and_logs_get_no_code() {
    let fleet = Fleet::start("evaluator");
    let seen = fleet.path().join("arguments");
    let script = format!("echo \"$@\" > {0}.part && mv {0}.part {0}", seen.display());
    let browser = write_script(&fleet.path().join("browser"), &script);
    let opened = fleet.command(&["open"]).env("BROWSER", &browser).output().unwrap();
    let link = String::from_utf8(opened.stdout).unwrap();
    let code = link.trim().split_once("/#code=").expect("a link with a code").1;
    wait_until("the browser starts", LIMIT, || seen.exists().then_some(()));
    let arguments = fs::read_to_string(&seen).unwrap();
    let file = arguments.trim().strip_prefix("file://").expect("a file");
    assert!(!arguments.contains(code), "every user of the machine reads arguments: {arguments}");
    assert_eq!(fs::metadata(file).unwrap().mode() & 0o777, 0o600);
    assert!(fs::read_to_string(file).unwrap().contains(link.trim()));

    let json = fleet.run_json(&["open"]).unwrap();
    assert!(json["url"].as_str().unwrap().contains("/#code="), "{json}");
    let reader = fleet.path().join("reader").display().to_string();
    fleet.run(&["user", "create", "rita", "--out", &reader]).assert_success();
    let readers = run_flotilla(&["open", "--print", "--dir", &reader], []);
    assert!(readers.stdout.contains("/#code="), "{readers:?}");
    let client = fleet.path().join("client").display().to_string();
    fleet.run(&["user", "create", "carl", "--scope", "client", "--out", &client]).assert_success();
    let refused = run_flotilla(&["open", "--print", "--dir", &client], []);
    refused.assert_refused(&["carl", "needs reader", "(K104)"]);
    for log in find_logs(fleet.path()) {
        let text = fs::read_to_string(&log).unwrap();
        assert!(!text.contains("#code=") && !text.contains(code), "{}", log.display());
    }
}

#[test]
fn a_link_to_an_open_fleet_needs_no_code_and_without_a_fleet_there_is_none() {
    let fleet = Fleet::start_open("evaluator");
    let gateway = fleet.read_fleet_file()["gateway"].as_str().unwrap().to_owned();
    let opened = fleet.run(&["open", "--print"]);
    assert_eq!(opened.stdout.trim(), format!("http://{gateway}/"), "{opened:?}");
    let nowhere = run_flotilla(&["open", "--print", "--dir", "/nowhere"], []);
    nowhere.assert_refused(&["no fleet has run in /nowhere"]);
}

#[test]
fn a_status_fits_a_screen_and_names_problems_remedies_and_the_next_command() {
    let mut fleet = Fleet::start("evaluator=2");
    let healthy = fleet.run(&["status"]);
    assert_eq!(healthy.code, 0, "{healthy:?}");
    let lines: Vec<&str> = healthy.stdout.lines().collect();
    assert!(lines.len() <= 24, "{}", healthy.stdout);
    let (last, others) = lines.split_last().unwrap();
    assert!(others.iter().all(|line| line.chars().count() <= 80), "{}", healthy.stdout);
    for words in ["healthy", "2 ready", "evaluator-1", "coordinator", "works", "free"] {
        assert!(healthy.stdout.contains(words), "{words}: {}", healthy.stdout);
    }
    let next = format!("next: flotilla run new --dir {}", fleet.path().display());
    assert_eq!(*last, next);

    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(30, 10));
    let waiting = fleet.run(&["status"]);
    assert_eq!(waiting.code, 1, "{waiting:?}");
    for words in ["has a problem", &run, "has no trainer", "remedy: start one with `flotilla agent"]
    {
        assert!(waiting.stdout.contains(words), "{words}: {}", waiting.stdout);
    }
    let json = fleet.run(&["status", "--json"]);
    assert_eq!(json.code, 1, "{json:?}");
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!((&json["healthy"], &json["runs"][&run]), (&false.into(), &"RUNNING".into()));
    assert!(json["problems"][0]["remedy"].as_str().unwrap().contains("flotilla agent"), "{json}");

    fs::rename(fleet.path().join("store"), fleet.path().join("away")).unwrap();
    fs::write(fleet.path().join("store"), "not a directory").unwrap();
    let broken = fleet.run(&["status"]);
    assert!(broken.code == 1 && broken.stdout.contains("the store does not work"), "{broken:?}");

    fleet.terminate();
    wait_until("the fleet is down", LIMIT, || fleet.exit_status());
    let down = fleet.run(&["status"]);
    assert!(down.code == 1 && down.stderr.contains("flotilla up --dir"), "{down:?}");
}

/// Checks a spec with a fleet.
fn check_spec(fleet: &Fleet, spec: &Path) {
    let checked = fleet.run(&["run", "check", spec.to_str().unwrap()]);
    assert_eq!(checked.code, 0, "{checked:?}\n{}", fs::read_to_string(spec).unwrap());
}

#[test]
fn init_asks_three_questions_at_a_terminal_and_writes_a_spec_that_is_accepted() {
    let fleet = Fleet::start_open("evaluator");
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model().display().to_string();
    let data = files.path("data.jsonl").display().to_string();
    let directory = tempfile::tempdir().unwrap();
    let Some(mut terminal) = Terminal::start(&["init", "--dir", "sft"], directory.path()) else {
        return;
    };
    terminal.answer("Train [demo]: ", "stf");
    terminal.answer("none of demo, raft, sft, none", "sft");
    terminal.answer("Base model", &model);
    terminal.answer("Examples (a file, or hub:org/name)", "nowhere.jsonl");
    terminal.answer("nowhere.jsonl (F101)", &data);
    assert!(terminal.wait_end().success(), "{}", terminal.text());
    let spec = directory.path().join("sft/run.yaml");
    check_spec(&fleet, &spec);
    let text = terminal.text();
    assert!(text.contains("flotilla run submit") && text.contains("sft/run.yaml"), "{text}");
    let before = fs::read_to_string(&spec).unwrap();
    let mut again = Terminal::start(&["init", "--dir", "sft"], directory.path()).unwrap();
    assert!(again.wait_end().success(), "it asks nothing: {}", again.text());
    assert_eq!(fs::read_to_string(&spec).unwrap(), before);

    // A file of the usual name is the default.
    let prompts = (10..40).map(|n| format!("{{\"prompt\": \"{n}+1=\", \"answer\": {}}}\n", n + 1));
    fs::write(directory.path().join("prompts.jsonl"), prompts.collect::<String>()).unwrap();
    let mut terminal = Terminal::start(&["init", "--dir", "raft"], directory.path()).unwrap();
    terminal.answer("Train [demo]: ", "raft");
    terminal.answer("Base model", &model);
    // Without answers, no verifier is chosen: another file is asked for, and no verifier.
    fs::write(directory.path().join("plain.jsonl"), "{\"prompt\": \"1+1=\"}\n").unwrap();
    terminal.answer("Prompts (a file, or hub:org/name) [prompts.jsonl]: ", "plain.jsonl");
    terminal.answer("no verifier can be chosen", "");
    assert!(terminal.wait_end().success(), "{}", terminal.text());
    check_spec(&fleet, &directory.path().join("raft/run.yaml"));

    let mut terminal = Terminal::start(&["init", "--dir", "demo"], directory.path()).unwrap();
    terminal.answer("Train [demo]: ", "");
    assert!(terminal.wait_end().success(), "{}", terminal.text());
    check_spec(&fleet, &directory.path().join("demo/demo/base.yaml"));
}

#[test]
fn init_asks_nothing_without_a_terminal_or_with_options() {
    let directory = tempfile::tempdir().unwrap();
    let quiet = directory.path().join("quiet");
    let init = run_flotilla(&["init", "--dir", quiet.to_str().unwrap()], []);
    init.assert_success();
    assert!(init.stderr.contains("no spec written; `flotilla run new`"), "{init:?}");
    let options = ["init", "--dir", "named", "--name", "garage"];
    let Some(mut terminal) = Terminal::start(&options, directory.path()) else { return };
    assert!(terminal.wait_end().success(), "{}", terminal.text());
    for name in ["quiet", "named"] {
        let at = directory.path().join(name);
        assert!(at.join("keys/ca.pem").exists() && !at.join("run.yaml").exists(), "{name}");
        assert!(!at.join("demo").exists(), "{name}");
    }
}
