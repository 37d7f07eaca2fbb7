//! Runs that train with other objectives than the likelihood of the best samples.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::time::Duration;

use e2e::{Fleet, Sampling, SpecFiles};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(180);

const SAMPLING: Sampling = Sampling { prompts: 16, per_prompt: 6, max_new_tokens: 8, cycles: 2 };

#[test]
fn runs_train_on_failures_and_pairs_as_their_objective_says() {
    let fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 10));
    fleet.await_success(&base, LIMIT);
    let spec = files.write_raft_spec(&base, SAMPLING);
    let raft = std::fs::read_to_string(&spec).unwrap();
    // Samples that end at the limit are trained on too.
    let raft = raft.replace("raft:\n", "raft:\n  selection: { finished: false }\n");
    for (objective, reason) in [
        ("{rloo: {truncate_tokens: 2}}\n  token_logprobs: true", ""),
        ("{dapo: {kl: 0.01}}", ""),
        ("{dpo: {nll: 0.1}}", "unpaired"),
        ("kto", ""),
    ] {
        let text = raft.replace("raft:\n", &format!("raft:\n  objective: {objective}\n"));
        std::fs::write(&spec, text).unwrap();
        let run = fleet.submit(&spec);
        let ended = fleet.await_success(&run, LIMIT);
        let select = ["select", "--run", &run, "--cycle", "1"];
        let selection = fleet.run_json(&select).expect("a comparison");
        let kept = |side: &str| selection[side]["kept"].as_u64().expect("a number");
        let has_pairs = reason == "unpaired";
        assert!(has_pairs || kept("was") > kept("would"), "{objective}: {selection:#}");
        let was = &selection["was"];
        let reward = was["reward"].as_f64().expect("a mean");
        assert!(reward > 0.0 && reward < 1.0, "{objective} trains on failures: {selection:#}");
        assert!(reason.is_empty() || was["dropped"][reason].is_u64(), "{selection:#}");
        assert_eq!(ended["cyclesDone"].as_array().unwrap().len(), 3, "{ended:#}");
        fleet.assert_clean_audit(&run);
        let facts = fleet.read_facts(&run);
        check_weighting(&facts, objective);
        check_token_logprobs(&facts, objective.contains("token_logprobs"));

        let out = fleet.path().join("pairs.jsonl");
        let mut exported = select.to_vec();
        exported.extend(["--pairs", "--out", out.to_str().unwrap()]);
        let exported = fleet.run_json(&exported).expect("pairs");
        let lines = std::fs::read_to_string(&out).unwrap();
        let pairs: Vec<Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(exported["pairs"], pairs.len());
        assert!(!pairs.is_empty());
        for pair in &pairs {
            let has_digit = |side: &str| {
                pair[side].as_str().unwrap().contains(|letter: char| letter.is_ascii_digit())
            };
            assert!(has_digit("chosen") && !has_digit("rejected"), "{pair:#}");
        }
    }
}

/// Checks that each last checkpoint tells how its objective weighted the tokens.
fn check_weighting(facts: &[Value], objective: &str) {
    let last = facts.iter().map(|fact| &fact["fact"]).filter(|fact| {
        fact["final"] == true && fact["cycle"].as_u64().is_some_and(|cycle| cycle > 0)
    });
    for checkpoint in last {
        let found = &checkpoint["weighting"];
        let count = |field: &str| found[field].as_str().map_or(0, |text| text.parse().unwrap());
        let tokens: u64 = count("tokens");
        assert!(tokens > 0 && count("dropped") < tokens, "{objective}: {checkpoint:#}");
        let ratios = found["ratios"].as_array();
        assert_eq!(
            ratios.is_some(),
            objective.contains("rloo") || objective.contains("dapo") || objective == "kto",
            "{objective}: {found:#}"
        );
        if let Some(ratios) = ratios {
            let of = |ratio: &Value| ratio.as_str().unwrap().parse::<u64>().unwrap();
            assert_eq!(ratios.iter().map(of).sum::<u64>(), tokens, "{found:#}");
            let ratio = found["ratio"].as_f64().unwrap();
            assert!((0.5..2.0).contains(&ratio), "the mean ratio is near 1: {found:#}");
        }
    }
}

/// Checks that training samples have the log-probability of each token, in 3 bytes a token.
fn check_token_logprobs(facts: &[Value], wanted: bool) {
    let (mut tokens, mut bytes, mut held) = (0, 0, 0);
    for samples in facts.iter().map(|fact| &fact["fact"]) {
        for sample in samples["samples"].as_array().into_iter().flatten() {
            let encoded = sample["tokenLogprobs"].as_str().map_or(0, str::len);
            if samples["purpose"] == "TRAIN" {
                tokens += sample["tokens"].as_u64().unwrap();
                let ids = sample["tokenIds"].to_string().len();
                bytes += encoded + if sample["tokenIds"].is_array() { ids } else { 0 };
                assert_eq!(encoded > 0, wanted, "{sample:#}");
            } else {
                held += encoded;
            }
        }
    }
    assert_eq!(held, 0, "held-out samples record nothing");
    let each = bytes as f64 / tokens as f64;
    assert_eq!(each > 0.0, wanted);
    eprintln!("token log-probabilities: {each:.2} bytes a token");
}
