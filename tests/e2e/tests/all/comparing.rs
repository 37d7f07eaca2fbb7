//! `flotilla compare`: scores of a file, and programs and models that prefer one of two answers.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use e2e::{Fleet, Sampling, SpecFiles, run_flotilla};
use requirements::require_program;
use serde_json::{Value, json};

use super::generating_data::{ScriptedEndpoint, chat_reply, last_message};

const LIMIT: Duration = Duration::from_secs(240);

const SAMPLING: Sampling = Sampling { prompts: 4, per_prompt: 2, max_new_tokens: 8, cycles: 1 };

const PROMPTS: u32 = 40;

/// Writes each question to the file of its argument, and prefers as `preference` says.
const JUDGE: &str = r#"
import json, sys
def digits(text):
    return sum(letter.isdigit() for letter in text)
for line in sys.stdin:
    request = json.loads(line)
    number = request.pop("id")
    assert sorted(request) == ["first", "prompt", "second"], request
    with open(sys.argv[1], "a") as log:
        log.write(json.dumps(request, sort_keys=True) + "\n")
    first, second = digits(request["first"]), digits(request["second"])
    print(json.dumps({"id": number, "better": PREFERENCE}), flush=True)
"#;

const MORE_DIGITS: &str = r#""first" if first > second else "second" if second > first else "tie""#;

/// A judge that is a Python program.
struct ProgramJudge {
    file: PathBuf,
    log: PathBuf,
}

impl ProgramJudge {
    fn create(directory: &Path, name: &str, preference: &str) -> Self {
        let path = |ending: &str| directory.join(format!("{name}.{ending}"));
        let (program, file, log) = (path("py"), path("yaml"), path("log"));
        fs::write(&program, JUDGE.replace("PREFERENCE", preference)).expect("a program");
        let argv = json!(["python3", program, log]);
        fs::write(&file, format!("command: {{ argv: {argv} }}\n")).expect("a judge");
        Self { file, log }
    }

    /// Returns the questions since the last call.
    fn take_questions(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.log).expect("it was asked");
        fs::remove_file(&self.log).expect("it was there");
        text.lines().map(str::to_owned).collect()
    }
}

/// Runs two runs with the same held-out prompts: the base of the first writes anything, that of the
/// second writes numbers. Returns their cycles 0.
fn start_runs(fleet: &Fleet, files: &SpecFiles) -> [String; 2] {
    [1, 150].map(|steps| {
        let base = fleet.submit(&files.write_sft_spec(steps, 0));
        fleet.await_success(&base, LIMIT);
        let spec = files.write_raft_spec(&base, SAMPLING);
        let line = |n: u32| {
            let category = if n.is_multiple_of(2) { "even" } else { "odd" };
            format!("{}\n", json!({ "prompt": format!("{n}9+1="), "category": category }))
        };
        let heldout: String = (100..100 + PROMPTS).map(line).collect();
        fs::write(files.path("heldout.jsonl"), heldout).expect("the prompts");
        // All samples of both pass.
        let text = fs::read_to_string(&spec).expect("the spec").replace("'[0-9]'", "'(?s).'");
        let more = "  heldout_samples_per_prompt: 2\n  samples_per_prompt";
        fs::write(&spec, text.replace("  samples_per_prompt", more)).expect("the spec");
        let run = fleet.submit(&spec);
        fleet.await_success(&run, LIMIT);
        format!("{run}/0")
    })
}

fn compare(fleet: &Fleet, [a, b]: &[String; 2], judge: &Path) -> Value {
    let judge = judge.display().to_string();
    fleet.run_json(&["compare", a, b, "--judge", &judge]).expect("a comparison")
}

#[test]
fn scores_of_a_file_are_compared_without_a_fleet() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("pairs.jsonl");
    let compare = |pairs: &[[f64; 2]]| {
        let line = |[a, b]: &[f64; 2]| format!("{}\n", json!({ "a": a, "b": b }));
        fs::write(&file, pairs.iter().map(line).collect::<String>()).expect("a file");
        let name = file.display().to_string();
        run_flotilla(&["compare", "--pairs", &name, "--alpha", "0.05", "--json"], [])
    };
    let read = |pairs: &[[f64; 2]]| -> Value {
        let output = compare(pairs);
        output.assert_success();
        serde_json::from_str(&output.stdout).expect("JSON")
    };
    let number = |value: &Value| value.as_f64().expect("a number");

    let better: Vec<[f64; 2]> =
        (0..1000).map(|line| if line % 5 == 0 { [0.0, 1.0] } else { [1.0, 1.0] }).collect();
    let found = read(&better);
    let mut keys: Vec<&String> = found.as_object().expect("an object").keys().collect();
    keys.sort();
    let expected = ["at", "decision", "difference", "interval", "mean_a", "mean_b", "p"];
    assert_eq!(keys, expected, "{found}");
    // Later pairs are ignored: ten of the first 46 differ.
    assert_eq!((&found["decision"], &found["at"]), (&json!("b"), &json!(46)), "{found}");
    let (p, difference) = (number(&found["p"]), number(&found["difference"]));
    assert!(p > 0.0 && p < 0.05 && (difference - 10.0 / 46.0).abs() < 1e-9, "{found}");
    let [low, high] = [0, 1].map(|end| number(&found["interval"][end]));
    assert!(0.0 < low && low < difference && difference < high, "{found}");

    let equal: Vec<[f64; 2]> =
        (0..1000).map(|line| if line % 2 == 0 { [1.0, 0.0] } else { [0.0, 1.0] }).collect();
    let found = read(&equal);
    let expected = json!({
        "decision": "undecided", "at": 1000, "p": 1.0, "difference": 0.0,
        "interval": found["interval"], "mean_a": 0.5, "mean_b": 0.5,
    });
    assert_eq!(found, expected);
    let [low, high] = [0, 1].map(|end| number(&found["interval"][end]));
    assert!(-0.2 < low && low < 0.0 && 0.0 < high && high < 0.2, "{found}");

    let wrong = compare(&[[0.5, 1.0], [0.0, 0.0], [0.5, 1.5]]);
    wrong.assert_refused(&["pairs.jsonl", "line 3", "b is 1.5", "D101"]);
}

#[test]
fn a_judge_decides_for_the_better_model_and_one_that_prefers_a_position_does_not() {
    if require_program("python3").is_none() {
        return;
    }
    let fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let sides = start_runs(&fleet, &files);
    let [a, b] = &sides;
    let by_verdicts = fleet.run_json(&["compare", a, b]).expect("a comparison");
    assert_eq!(by_verdicts["decision"], "undecided", "{by_verdicts:#}");

    let judge = ProgramJudge::create(fleet.path(), "digits", MORE_DIGITS);
    let found = compare(&fleet, &sides, &judge.file);
    assert_eq!((&found["decision"], &found["pairs"]), (&json!("b"), &json!(PROMPTS)), "{found:#}");
    assert!(found["at"].as_u64() < Some(PROMPTS.into()), "{found:#}");
    let categories = found["categories"].as_array().map_or(0, Vec::len);
    assert_eq!((categories, &found["judge"]["unjudged"]), (2, &json!(0)), "{found:#}");
    let asked = judge.take_questions();
    assert!(asked.len() < 2 * PROMPTS as usize, "no question after the decision");
    assert_eq!(compare(&fleet, &sides, &judge.file), found);
    assert_eq!(judge.take_questions(), asked, "a repetition asks the same");
    let swapped = compare(&fleet, &[b.clone(), a.clone()], &judge.file);
    assert_eq!(swapped["decision"], "a", "{swapped:#}");

    let path = judge.file.display().to_string();
    let shown = fleet.run(&["compare", a, b, "--judge", &path]);
    shown.assert_success();
    let better = format!("{b} is better");
    let words =
        [&*better, "preferred by the judge", "judged by python3 ", "the first position won"];
    for words in words.into_iter().chain(["tokens per sample", "perplexity of heldout"]) {
        assert!(shown.stdout.contains(words), "no {words} in: {}", shown.stdout);
    }

    let biased = ProgramJudge::create(fleet.path(), "biased", r#""first""#);
    let found = compare(&fleet, &sides, &biased.file);
    assert_eq!((&found["decision"], &found["at"]), (&json!("undecided"), &json!(PROMPTS)));
    let counts = &found["judge"];
    assert!(counts["judged"] == counts["first_won"] && counts["second_won"] == 0, "{counts:#}");

    let silent = ProgramJudge::create(fleet.path(), "silent", "None");
    let path = silent.file.display().to_string();
    fleet.run(&["compare", a, b, "--judge", &path]).assert_refused(&["R122", "8 pairs in a row"]);
    fs::write(&silent.file, "command: { argv: [a], serve: true }").expect("a judge");
    let refused = ["R102", "unknown key serve", "silent.yaml"];
    fleet.run(&["compare", a, b, "--judge", &path]).assert_refused(&refused);

    assert_a_model_judges(&fleet, &sides);
}

/// Trains a model for one step, and that model for many more: it then writes numbers. Returns both
/// runs.
fn train_twice(fleet: &Fleet, files: &SpecFiles) -> [String; 2] {
    let weak = fleet.submit(&files.write_sft_spec(1, 0));
    fleet.await_success(&weak, LIMIT);
    let spec = files.write_sft_spec(150, 0);
    let text = fs::read_to_string(&spec).expect("the spec");
    let base = text.lines().find(|line| line.starts_with("base:")).expect("a base").to_owned();
    let text = text.replace(&base, &format!("base: {{ checkpoint: {weak} }}"));
    fs::write(&spec, text.replace("name: base", "name: tuned")).expect("the spec");
    let tuned = fleet.submit(&spec);
    fleet.await_success(&tuned, LIMIT);
    [weak, tuned]
}

#[test]
fn checkpoints_of_sft_runs_are_compared_by_new_samples_which_move_a_channel_too() {
    let fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let [weak, tuned] = &train_twice(&fleet, &files);
    fleet.run(&["compare", weak, tuned]).assert_refused(&["R117", "--prompts"]);
    let line =
        |n: u32| format!("{}\n", json!({ "prompt": format!("{n}9+1="), "category": "sums" }));
    let file = files.path("asked.jsonl");
    fs::write(&file, (100..100 + PROMPTS).map(line).collect::<String>()).expect("the prompts");
    let file = file.display().to_string();
    let settings = "sampling: {temperature: 1, max_new_tokens: 8}";
    let options = ["--prompts", &file, "--verifier", "regex: {pattern: '[0-9]'}"];
    let options = [&options[..], &["--settings", settings]].concat();
    let measure =
        |models: &[&str]| fleet.run_json(&[&["compare"][..], models, &options[..]].concat());
    let unscored = fleet.run(&["compare", tuned, "--prompts", &file]);
    assert!(unscored.code == 2 && unscored.stderr.contains("--verifier"), "{unscored:?}");

    let found = measure(&[tuned]).expect("a comparison");
    assert_eq!((&found["decision"], &found["pairs"]), (&json!("b"), &json!(PROMPTS)), "{found:#}");
    assert_eq!(found["a"]["model"], format!("the base of {tuned}"), "{found:#}");
    let name = found["b"]["model"].as_str().expect("a name");
    assert!(name.starts_with(&format!("{tuned}/0/")), "{name}");
    assert_eq!(
        (&found["a"]["run"], &found["b"]["run"]),
        (&json!("measure-1"), &json!("measure-2"))
    );
    assert_eq!(found["categories"][0]["pairs"], PROMPTS, "{found:#}");
    // The checkpoint is that base: its samples are there.
    let again = measure(&[weak, tuned]).expect("a comparison");
    assert_eq!((&again["a"]["run"], &again["b"]["run"]), (&found["a"]["run"], &found["b"]["run"]));
    assert_eq!((&again["p"], &again["interval"]), (&found["p"], &found["interval"]));
    let random = measure(&[weak]).expect_err("a refusal").to_string();
    assert!(random.contains("R117") && random.contains("random weights"), "{random}");

    let trained = fleet.run_json(&["run", "show", "measure-1"]).expect("a run");
    assert_eq!((&trained["state"], &trained["kind"]), (&json!("SUCCEEDED"), &json!("raft")));
    for run in ["measure-1", "measure-2"] {
        fleet.assert_clean_audit(run);
    }
    let name_model = |model: &str, more: &[&str]| {
        fleet.run(&[&["channel", "move", "stable", "--checkpoint", model][..], more].concat())
    };
    name_model(weak, &[]).assert_success();
    name_model(tuned, &["--if-better"]).assert_success();
    name_model(weak, &["--if-better"]).assert_refused(&["R119"]);
    fleet.assert_clean_audit("stable");
}

#[test]
fn an_adapter_is_measured_with_its_model_and_judged_without_a_verifier() {
    if require_program("python3").is_none() {
        return;
    }
    let fleet = Fleet::start("trainer,generator");
    let files = SpecFiles::create(fleet.path());
    let spec = files.write_adapter_spec(&files.write_model(), 2, 0);
    let text = fs::read_to_string(&spec).expect("the spec");
    let evals = text.lines().find(|line| line.starts_with("evals:")).expect("evals").to_owned();
    fs::write(&spec, text.replace(&evals, "")).expect("the spec");
    let run = fleet.submit(&spec);
    fleet.await_success(&run, LIMIT);
    let file = files.path("asked.jsonl");
    fs::write(&file, "{\"prompt\": \"1+1=\"}\n{\"prompt\": \"2+2=\"}\n").expect("the prompts");
    let judge = ProgramJudge::create(fleet.path(), "digits", MORE_DIGITS);
    let (file, judge) = (file.display().to_string(), judge.file.display().to_string());
    let settings = "sampling: {max_new_tokens: 4}";
    let options = ["--prompts", &file, "--judge", &judge, "--settings", settings];
    let found = fleet.run_json(&[&["compare", &*run][..], &options[..]].concat());
    let found = found.expect("a comparison");
    assert_eq!((&found["pairs"], &found["judge"]["unjudged"]), (&json!(2), &json!(0)), "{found:#}");
    assert_eq!(found["a"]["pass_rate"], Value::Null, "{found:#}");
    let sampled_with = |side: &str| -> BTreeSet<String> {
        let run = found[side]["run"].as_str().expect("a run");
        let facts = fleet.read_facts(run).into_iter();
        let adapters = facts.filter_map(|it| Some(it["fact"]["adapter"].as_str()?.to_owned()));
        adapters.filter(|it| !it.is_empty()).collect()
    };
    assert!(sampled_with("a").is_empty(), "the base has no adapter");
    assert_eq!(sampled_with("b").len(), 1);
}

/// A model behind an endpoint decides, too. Its first reply is unreadable, and it is asked again.
fn assert_a_model_judges(fleet: &Fleet, sides: &[String; 2]) {
    let endpoint = ScriptedEndpoint::start(|number, body| {
        let text = last_message(body);
        let digits = |name: &str| {
            let part = text.split(&format!("<{name}>\n")).nth(1).unwrap_or_default();
            let part = part.split(&format!("\n</{name}>")).next().unwrap_or_default();
            part.chars().filter(char::is_ascii_digit).count()
        };
        let better = match digits("first").cmp(&digits("second")) {
            std::cmp::Ordering::Greater => "first",
            std::cmp::Ordering::Less => "second",
            std::cmp::Ordering::Equal => "tie",
        };
        let reply = json!({ "reason": "digits", "better": better }).to_string();
        chat_reply(if number == 0 { "The first one." } else { &reply }, "stop")
    });
    let file = fleet.path().join("model.yaml");
    let url = &endpoint.url;
    let judge = format!("endpoint: {{ url: '{url}', model: m, concurrency: 1 }}\nseed: 5\n");
    fs::write(&file, judge).expect("a judge");
    let found = compare(fleet, sides, &file);
    assert_eq!((&found["decision"], &found["judge"]["unjudged"]), (&json!("b"), &json!(0)));
    assert_eq!(found["judge"]["judge"], format!("m at {url}"));
    let bodies = endpoint.bodies(true);
    assert_eq!(bodies[0], bodies[1], "asked once more");
    let asked = bodies.len() as u64;
    let judged = found["judge"]["judged"].as_u64().expect("a number");
    // One was repeated, one may have been asked when the others decided.
    assert!((judged + 1..=judged + 2).contains(&asked), "{asked} for {judged}");
}
