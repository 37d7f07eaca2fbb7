//! Prompt suites: their reported results, recomputed from the samples.

use std::{collections::BTreeMap, time::Duration};

use e2e::{Fleet, Sampling, SpecFiles};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(240);

const SMALL: Sampling = Sampling { prompts: 8, per_prompt: 2, max_new_tokens: 8, cycles: 1 };

/// By prompt: the numbers of passed samples and of all samples.
type Tally = BTreeMap<String, (f64, f64)>;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_default()
}

fn heldout_samples<'a>(facts: &'a [Value], suite: &str) -> Vec<&'a Value> {
    let of = |fact: &&Value| {
        let subject = fact["subject"].as_str().unwrap_or_default();
        let named = fact["fact"]["suite"].as_str().unwrap_or_default() == suite;
        subject.contains(".samples.1.") && fact["fact"]["purpose"] == "HELDOUT" && named
    };
    let all = facts.iter().filter(of).flat_map(|fact| fact["fact"]["samples"].as_array());
    all.flatten().collect()
}

/// Counts the samples that pass.
fn tally_samples(samples: &[&Value], passes: impl Fn(&str, &str) -> bool) -> Tally {
    let mut tally = Tally::new();
    for sample in samples {
        let (id, text) = (sample["promptId"].as_str(), sample["text"].as_str());
        let (id, text) = (id.unwrap_or_default(), text.unwrap_or_default());
        let (passed, all) = tally.entry(id.to_owned()).or_default();
        *passed += f64::from(u8::from(passes(id, text)));
        *all += 1.0;
    }
    tally
}

#[test]
fn suites_are_judged_by_their_own_verifiers_and_their_rates_match_the_samples() {
    let fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(10, 0));
    fleet.await_success(&base, LIMIT);
    let spec = files.write_raft_spec(&base, SMALL);
    let text = std::fs::read_to_string(&spec).expect("the spec");
    // Both suites and the training prompts have the same ids.
    let prompt = |n: u32| json!({ "id": format!("p{n}"), "prompt": format!("{n}7+1="), "answer": n.to_string() });
    let lines: String = (0..6).map(|n| format!("{}\n", prompt(n))).collect();
    std::fs::write(files.path("suite.jsonl"), lines).expect("the prompts");
    let evals = "evals:
  - { name: heldout, text: heldout.txt, n_ctx: 64 }
  - { name: digits, prompts: suite.jsonl, verifier: { regex: { pattern: '[0-9]' } }, samples_per_prompt: 4 }
  - { name: same, prompts: suite.jsonl, verifier: { exact: { extract: '([0-9])' } }, sampling: { temperature: 0.5 } }";
    let old = "evals: [{ name: heldout, text: heldout.txt, n_ctx: 64 }]";
    let gates = "  gates: { pass_rate: [{ suite: same, margin: 1 }], entropy: { least: 19 } }\n";
    let suited = format!("{}{gates}", text.replace(old, evals));
    assert!(suited.contains("name: same"));
    std::fs::write(&spec, suited).expect("the spec");
    let run = fleet.submit(&spec);
    let ended = fleet.await_success(&run, LIMIT);
    fleet.assert_clean_audit(&run);

    let facts = fleet.read_facts(&run);
    let done = &ended["cyclesDone"][1];
    let digit = |text: &str| text.chars().rev().find(char::is_ascii_digit);
    let digits = tally_samples(&heldout_samples(&facts, "digits"), |_, text| digit(text).is_some());
    let same = tally_samples(&heldout_samples(&facts, "same"), |id, text| {
        digit(text).is_some_and(|n| id.ends_with(n))
    });
    for (place, (name, tally, each)) in
        [("digits", &digits, 4.0), ("same", &same, 1.0)].into_iter().enumerate()
    {
        let reported = &done["suites"][place];
        assert_eq!((&reported["suite"], tally.len()), (&json!(name), 6), "{done:#}");
        let counts: Vec<(f64, f64)> = tally.values().copied().collect();
        assert!(counts.iter().all(|(_, all)| *all == each), "{tally:?}");
        let rate = counts.iter().map(|(passed, all)| passed / all).sum::<f64>() / 6.0;
        assert!((number(&reported["rate"]["mean"]) - rate).abs() < 1e-9, "{rate}: {reported:#}");
        assert_eq!(reported["rate"]["samples"], 6.0 * each, "{reported:#}");
        assert!(
            (number(&reported["passAt"][0]["mean"]) - rate).abs() < 1e-9,
            "pass@1: {reported:#}"
        );
    }
    let solved = digits.values().filter(|(passed, _)| *passed > 0.0).count();
    let reported = &done["suites"][0]["passAt"][1];
    assert_eq!(reported["k"], 4);
    let any = f64::from(u8::try_from(solved).expect("of six")) / 6.0;
    assert!((number(&reported["mean"]) - any).abs() < 1e-9, "{any}: {reported:#}");
    let found = done["findings"].to_string();
    assert!(found.contains("entropy"), "below 19 nats per token: {done:#}");

    let of = |kind: &str| {
        let subject = format!("flotilla.{run}.{kind}.1");
        let found = facts.iter().filter(|fact| {
            fact["subject"].as_str().is_some_and(|found| found.starts_with(&subject))
        });
        found.map(|fact| fact["fact"].clone()).collect::<Vec<Value>>()
    };
    let trained = of("samples").into_iter().filter(|fact| fact["purpose"] == "TRAIN");
    let (mut nats, mut tokens) = (0.0, 0.0);
    for sample in trained.flat_map(|fact| fact["samples"].as_array().cloned()).flatten() {
        nats -= sample["logprob"].as_f64().expect("candle reports each");
        tokens += number(&sample["tokens"]);
    }
    let selected = of("selection").pop().expect("cycle 1 selected");
    assert_eq!(selected["entropySamples"], 16);
    assert!((number(&selected["entropy"]) - nats / tokens).abs() < 1e-9, "{selected:#}");

    let shown = fleet.run(&["run", "explain", &run]).stdout;
    assert!(shown.contains("nats per token") && shown.contains("digits "), "{shown}");
    let compared = fleet.run(&["run", "diff", &run, &run]).stdout;
    assert!(compared.contains("digits") && compared.contains("same"), "{compared}");
}

#[test]
fn a_suite_without_a_verifier_or_in_another_kind_of_run_is_refused_before_it_starts() {
    let fleet = Fleet::start("trainer");
    let files = SpecFiles::create(fleet.path());
    let refused = |spec: std::path::PathBuf, suite: &str, message: &str| {
        let text = std::fs::read_to_string(&spec).expect("the spec");
        let old = "evals: [{ name: heldout, text: heldout.txt, n_ctx: 64 }]";
        std::fs::write(&spec, text.replace(old, &format!("evals: [{suite}]"))).expect("the spec");
        let spec = spec.display().to_string();
        fleet.run(&["run", "submit", &spec]).assert_refused(&[message]);
    };
    let suite = "{ name: a, prompts: prompts.jsonl, verifier: { exact: {} } }";
    refused(files.write_sft_spec(5, 0), suite, "evals[0].prompts");
    let bare = "{ name: a, prompts: prompts.jsonl }";
    refused(files.write_raft_spec("base-1", SMALL), bare, "evals[0].verifier");
    let misspelt = "{ name: a, prompts: prompts.jsonl, verifier: { exact: {} }, pass: [1] }";
    refused(files.write_raft_spec("base-1", SMALL), misspelt, "pass");
}
