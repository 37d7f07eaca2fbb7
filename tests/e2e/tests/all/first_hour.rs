//! What new users meet in their first hour: mistakes in specs and data, a run of their own model, a
//! pause, and a fleet that is down.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

/// The mistakes that the parser's tests try.
#[path = "../../../../services/spec/tests/spec/broken/mistakes.rs"]
mod mistakes;

use std::{fs, time::Duration};

use e2e::{Fleet, SpecFiles, wait_until};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

const SPEC: &str = r"name: mine
seed: 1
base: { model: model }
raft:
  prompts: prompts.jsonl
  heldout: heldout.jsonl
  cycles: 3
  samples_per_prompt: 8
  verifier: { exact: { extract: '#(\d+)$' } }
  training:
    learning_rate: 0.002
  lora: { r: 16, alpha: 32 }
";

const LATIN1: &[u8] =
    b"{\"id\": \"p\", \"prompt\": \"1+1=\"}\n{\"id\": \"q\", \"prompt\": \"caf\xe9\"}\n";

/// A mistake in [`SPEC`], and the words of the error about it.
struct Mistake {
    change: (&'static str, &'static str),
    words: &'static [&'static str],
}

const fn mistake(from: &'static str, to: &'static str, words: &'static [&'static str]) -> Mistake {
    Mistake { change: (from, to), words }
}

/// Each is named by the spec's line and key, with the value, and what may stand there.
const MISTAKES: [Mistake; 30] = [
    mistake("{ model: model }", "base-1", &["line 3", "base: must be a section", "org/name"]),
    mistake("lora: { r: 16, alpha: 32 }", "lora: yes", &["line 12", "raft.lora: ", "r: 16"]),
    mistake("cycles: 3", "cycles:", &["line 7", "raft.cycles: has no value"]),
    mistake("  cycles: 3", "    cycles: 3", &["line 7", "indented otherwise"]),
    mistake("{ exact:", "{ exact: {", &["line 9", "a bracket of line 9 may be left open"]),
    mistake(
        "heldout.jsonl",
        "{ count: 5000 }",
        &["line 6, column 12: raft.heldout", "from 1 to 29"],
    ),
    mistake("prompts.jsonl", ".", &["line 5, column 12: raft.prompts", "is a directory"]),
    mistake("exact: { extract: '#(\\d+)$' }", "python: {}", &["no prompt has \"test\""]),
    mistake(
        "lora: {",
        "selection: { min_reward: 7 }\n  lora: {",
        &["line 12", "raft.selection.min_reward: must be at most 1", "not 7"],
    ),
    mistake("cycles:", "cycels:", &["line 7", "unknown key cycels in raft; did you mean cycles?"]),
    mistake(
        "cycles: 3",
        "cycles: two",
        &["line 7", "raft.cycles: must be from 0 to 10000, not two"],
    ),
    mistake(
        "prompts.jsonl",
        "promts.jsonl",
        &["line 5, column 12: raft.prompts", "did you mean prompts.jsonl?"],
    ),
    mistake(r"(\d+)$", r"(\d+$", &["line 9", "raft.verifier.exact.extract", "unclosed group"]),
    mistake("cycles: 3", "cycles: -2", &["line 7", "must be from 0 to 10000, not -2"]),
    mistake(
        "heldout.jsonl",
        "prompts.jsonl",
        &["line 6, column 12: raft.heldout", "raft.allow_overlap"],
    ),
    mistake(
        "model: model",
        "checkpoint: base-7",
        &["line 3, column 21: base.checkpoint", "no run base-7", "run list"],
    ),
    mistake("alpha: 32 }", "alpha: 32", &["line 12", "unclosed bracket"]),
    mistake("exact:", "exakt:", &["line 9", "in raft.verifier; did you mean exact?"]),
    mistake("cycles: 3", "cycles: 99999999999", &["line 7", "from 0 to 10000, not 99999999999"]),
    mistake("cycles: 3", "cycles: 4000000000", &["line 7", "from 0 to 10000, not 4000000000"]),
    mistake("0.002", "1e9", &["line 11", "raft.training.learning_rate", "from 1e-12 to 10"]),
    mistake("r: 16", "r: 100000", &["line 12", "raft.lora.r: must be from 1 to 4096, not 100000"]),
    mistake(
        "prompts.jsonl",
        "empty.jsonl",
        &["line 5, column 12: raft.prompts", "empty.jsonl", "no prompts in it"],
    ),
    mistake(
        "prompts.jsonl",
        "latin1.jsonl",
        &["line 5", "latin1.jsonl", "line 2, column 27", "iconv"],
    ),
    mistake(
        "prompts.jsonl",
        "broken.jsonl",
        &["line 5", "broken.jsonl", "line 2", "column 27: expected"],
    ),
    mistake(
        "prompts.jsonl",
        "twice.jsonl",
        &["line 5", "twice.jsonl", "line 2", "id \"p\" was used in line 1"],
    ),
    mistake("prompts.jsonl", "nothing.jsonl", &["line 5", "nothing.jsonl", "no field \"prompt\""]),
    mistake(
        "  verifier: { exact: { extract: '#(\\d+)$' } }\n",
        "",
        &["line 4", "raft.verifier: is missing"],
    ),
    mistake("  cycles: 3", "\tcycles: 3", &["line 7, column 1: a tab; YAML is indented by spaces"]),
    mistake(
        "heldout.jsonl",
        "{ share: 1.0 }",
        &["line 6", "raft.heldout.share: must be from", "not 1"],
    ),
];

fn write_data(files: &SpecFiles) {
    files.write_model();
    let lines = |numbers: std::ops::Range<u32>| -> String {
        let line = |n| {
            format!("{{\"id\": \"p{n}\", \"prompt\": \"{n}+1=\", \"answer\": \"{}\"}}\n", n + 1)
        };
        numbers.map(line).collect()
    };
    let one = "{\"id\": \"p\", \"prompt\": \"1+1=\"}\n";
    for (name, text) in [
        ("prompts.jsonl", lines(10..40)),
        ("heldout.jsonl", lines(50..60)),
        ("empty.jsonl", String::new()),
        ("broken.jsonl", format!("{one}{}", "{\"id\": \"q\", \"prompt\": \"a\" oops}\n")),
        ("twice.jsonl", one.repeat(2)),
        ("nothing.jsonl", "{\"promt\": \"1+1=\"}\n".into()),
    ] {
        fs::write(files.path(name), text).unwrap();
    }
    fs::write(files.path("latin1.jsonl"), LATIN1).unwrap();
}

#[test]
fn mistakes_in_specs_and_data_are_named_by_file_line_and_key() {
    let fleet = Fleet::start_open("evaluator");
    let files = SpecFiles::create(fleet.path());
    write_data(&files);
    let path = files.path("mine.yaml");
    let check = |spec: &[u8], options: &[&str]| {
        fs::write(&path, spec).unwrap();
        let arguments = [&["run", "check", path.to_str().unwrap()][..], options].concat();
        fleet.run(&arguments)
    };
    let good = check(SPEC.as_bytes(), &[]);
    assert_eq!(good.code, 0, "{good:?}");
    for Mistake { change: (from, to), words } in MISTAKES {
        let error = check(SPEC.replacen(from, to, 1).as_bytes(), &[]);
        assert_eq!(error.code, 1, "{to}: {error:?}");
        for word in ["mine.yaml"].iter().chain(words) {
            assert!(error.stderr.contains(word), "{word}: {}", error.stderr);
        }
    }
    let latin1 = check(b"name: caf\xe9\n", &[]);
    for word in ["mine.yaml", "line 1, column 10", "0xe9", "iconv"] {
        assert!(latin1.stderr.contains(word), "{word}: {}", latin1.stderr);
    }
    let json = check(SPEC.replace("cycles: 3", "cycles: -1").as_bytes(), &["--json"]);
    let error: Value = serde_json::from_str(&json.stderr).expect("one line of JSON");
    assert_eq!(error["code"], "R103");
    assert!(error["causes"][0].as_str().unwrap().contains("raft.cycles"), "{error:#}");
}

#[test]
fn mistakes_in_specs_are_named_by_file_line_and_remedy_without_a_fleet() {
    use mistakes::{
        JSON, MISTAKES_IN_JSON, SPEC, UNKNOWN_NAMES, WRONG_DOCUMENTS, WRONG_SECTIONS, WRONG_VALUES,
    };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mine.yaml");
    let yaml = [&UNKNOWN_NAMES[..], &WRONG_VALUES, &WRONG_SECTIONS, &WRONG_DOCUMENTS].concat();
    let in_yaml = yaml.iter().map(|mistake| (SPEC, mistake));
    let in_json = MISTAKES_IN_JSON.iter().map(|mistake| (JSON, mistake));
    let mut tried = 0;
    for (good, ((from, to), (line, column), words)) in in_yaml.chain(in_json) {
        fs::write(&path, good.replace(from, to)).unwrap();
        let check = e2e::run_flotilla(&["run", "check", path.to_str().unwrap()], []);
        let place = format!("line {line}, column {column}: ");
        check.assert_refused(&[&["mine.yaml", &place, "(R10"][..], *words].concat());
        tried += 1;
    }
    assert!(tried >= 40, "{tried}");
}

#[test]
fn files_before_one_that_cannot_be_read_are_reported() {
    let directory = tempfile::tempdir().unwrap();
    let files = SpecFiles::create(directory.path());
    write_data(&files);
    let [good, bad] = ["prompts.jsonl", "broken.jsonl"].map(|name| files.path(name));
    let stats =
        e2e::run_flotilla(&["data", "stats", good.to_str().unwrap(), bad.to_str().unwrap()], []);
    assert_eq!(stats.code, 1, "{stats:?}");
    assert!(stats.stdout.contains("prompts.jsonl: 30 prompts"), "{stats:?}");
    assert!(stats.stderr.contains("line 2"), "{stats:?}");
}

#[test]
fn a_run_of_ones_own_model_is_started_paused_and_explained_and_a_fleet_that_is_down_says_so() {
    let mut fleet = Fleet::start_open("evaluator");
    let files = SpecFiles::create(fleet.path());
    write_data(&files);
    let [model, prompts, out] =
        ["model", "prompts.jsonl", "own.yaml"].map(|name| files.path(name).display().to_string());
    let new = |more: &[&str]| {
        let named = ["run", "new", "--model", &model, "--prompts", &prompts, "--out", &out];
        fleet.run(&[&named[..], more].concat())
    };
    let started = new(&["--yes", "--cycles", "2"]);
    assert_eq!(started.code, 0, "{started:?}");
    let run = started.stdout.trim();
    assert_eq!(run, "mine-1", "{started:?}");
    for words in
        ["verifier numeric, which fits", "training needs at least", "flotilla run watch mine-1"]
    {
        assert!(started.stderr.contains(words), "{words}: {started:?}");
    }
    let waits = "waits: pool default has no trainer and no generator and no verifier";
    assert!(started.stderr.contains(waits), "{started:?}");
    for command in [
        &["run", "list"][..],
        &["run", "show", run],
        &["run", "explain", run],
        &["run", "check", &out],
    ] {
        let shown = fleet.run(command).stdout.replace("\n  ", " ");
        assert!(shown.contains(waits), "{command:?}: {shown}");
    }
    let written = fs::read_to_string(&out).unwrap();
    for line in
        ["base: { model: \"model\" }", "prompts: \"prompts.jsonl\"", "verifier: { numeric: {} }"]
    {
        assert!(written.contains(line), "{line}: {written}");
    }
    // The spec of the first run stays as it is.
    let again = new(&["--yes"]);
    assert!(again.code == 1 && again.stderr.contains("--force"), "{again:?}");
    let asked = fleet.run(&["run", "new", "--model", &model, "--yes"]);
    assert!(asked.stderr.contains("pass --prompts (A102)"), "{asked:?}");

    let paused = fleet.run(&["run", "pause", run, "--reason", "the fan is loud"]);
    assert_eq!(paused.code, 0, "{paused:?}");
    wait_until("the pause is shown", LIMIT, || {
        let shown = fleet.run_json(&["run", "show", run]).ok()?;
        (shown["message"] == "the fan is loud").then_some(())
    });
    let explained = fleet.run(&["run", "explain", run]).stdout;
    assert!(explained.contains("pause: the fan is loud"), "{explained}");
    assert!(explained.contains("raft run, paused in phase "), "{explained}");

    fleet.terminate();
    wait_until("the fleet is down", LIMIT, || fleet.exit_status());
    let down = fleet.run(&["run", "list"]);
    assert_eq!(down.code, 1, "{down:?}");
    let directory = fleet.path().display();
    let remedy = format!("the fleet in {directory} is down; `flotilla up --dir {directory}`");
    assert!(down.stderr.contains(&remedy), "{down:?}");
}
