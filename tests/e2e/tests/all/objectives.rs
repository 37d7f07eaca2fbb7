//! Runs that train with other objectives than the likelihood of the best samples.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{path::PathBuf, time::Duration};

use e2e::{Fleet, Sampling, SpecFiles, find_llama_cpp};
use serde_json::{Value, json};

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

/// Returns a spec of distillation from a teacher, without a verifier.
fn write_distillation(files: &SpecFiles, base: &str, teacher: &str, cycles: u32) -> PathBuf {
    let spec = files.write_raft_spec(base, Sampling { cycles, ..SAMPLING });
    let text = std::fs::read_to_string(&spec).unwrap();
    let kept = |line: &&str| !line.contains("verifier:") && !line.contains("heldout: heldout");
    let text: Vec<&str> = text.lines().filter(kept).collect();
    let distillation = format!(
        "raft:\n  objective: distillation\n  teacher: {{ checkpoint: {teacher} }}\n  \
         token_logprobs: true\n  selection: {{ finished: false }}"
    );
    let text = text.join("\n").replace("raft:", &distillation).replace("epochs: 1", "epochs: 2");
    std::fs::write(&spec, text.replace("0.001", "0.01")).unwrap();
    spec
}

/// Returns the log-probabilities of the tokens of the first dataset, as drawn and as scored.
fn scored_tokens(fleet: &Fleet, facts: &[Value]) -> Vec<(f64, f64)> {
    let selected = facts.iter().find(|fact| fact["fact"]["dataset"]["digest"].is_string());
    let digest = selected.unwrap()["fact"]["dataset"]["digest"].as_str().unwrap().to_owned();
    let hex = digest.strip_prefix("b3:").unwrap();
    let path = fleet.path().join("store/blobs").join(&hex[..2]).join(hex);
    let text = std::fs::read_to_string(path).unwrap();
    let values = |line: &Value, field: &str| -> Vec<f64> {
        let list = line[field].as_array().unwrap_or_else(|| panic!("{field}: {line:#}"));
        list.iter().map(|value| value.as_f64().unwrap()).collect()
    };
    let (mut tokens, mut finished) = (Vec::new(), 0);
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        finished += usize::from(line["unfinished"] != true);
        let (drawn, scored) = (values(&line, "behaviour"), values(&line, "teacher"));
        assert_eq!(drawn.len(), scored.len());
        tokens.extend(drawn.into_iter().zip(scored));
    }
    assert!(finished > 0, "ends are scored too");
    eprintln!("{finished} of {} samples ended by themselves", text.lines().count());
    tokens
}

fn divergences(facts: &[Value]) -> Vec<f64> {
    let last = facts.iter().map(|fact| &fact["fact"]).filter(|fact| fact["final"] == true);
    last.filter_map(|checkpoint| checkpoint["weighting"]["divergence"].as_f64()).collect()
}

#[test]
fn a_student_comes_nearer_to_its_teacher_without_a_verifier() {
    let fleet = Fleet::start("trainer,generator,scorer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 20));
    let teacher = fleet.submit(&files.write_sft_spec(120, 120));
    fleet.await_success(&base, LIMIT);
    fleet.await_success(&teacher, LIMIT);
    let run = fleet.submit(&write_distillation(&files, &base, &teacher, 4));
    fleet.await_success(&run, LIMIT);
    let audit = fleet.run_json(&["audit", &run]).expect("a clean audit");
    assert_eq!(audit["findings"], json!([]));
    assert_eq!(audit["planned_samples"], audit["accepted_samples"]);
    assert_eq!(audit["judged_samples"], 0);
    let facts = fleet.read_facts(&run);
    let found = divergences(&facts);
    assert_eq!(found.len(), 4, "{found:?}");
    assert!(found[3] < 0.8 * found[0], "the divergence from the teacher: {found:?}");
    check_token_logprobs(&facts, true);
    assert!(!facts.iter().any(|fact| fact["subject"].as_str().unwrap().contains(".verdicts.")));

    // What a policy draws, it scores in the same way.
    let own = fleet.submit(&write_distillation(&files, &base, &base, 1));
    fleet.await_success(&own, LIMIT);
    assert_scored_as_drawn(&fleet, &fleet.read_facts(&own), 0.002);
}

#[test]
fn llama_cpp_scores_what_it_draws_alike() {
    let Some(programs) = find_llama_cpp() else { return };
    let environment = [
        ("FLOTILLA_GENERATOR_ENGINE".to_owned(), "llama.cpp".to_owned()),
        ("FLOTILLA_LLAMA_CPP".to_owned(), programs),
    ];
    let fleet = Fleet::start_with("trainer,generator,scorer,evaluator", &[], environment);
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 20));
    fleet.await_success(&base, LIMIT);
    let run = fleet.submit(&write_distillation(&files, &base, &base, 1));
    fleet.await_success(&run, LIMIT);
    let facts = fleet.read_facts(&run);
    let scores = facts.iter().find(|fact| fact["subject"].as_str().unwrap().contains(".scores."));
    let engine = scores.unwrap()["fact"]["engine"].as_str().unwrap();
    assert!(engine.starts_with("llama.cpp"), "{engine}");
    assert_scored_as_drawn(&fleet, &facts, 0.01);
}

fn assert_scored_as_drawn(fleet: &Fleet, facts: &[Value], tolerance: f64) {
    let tokens = scored_tokens(fleet, facts);
    assert!(tokens.len() > 100, "{}", tokens.len());
    let apart = tokens.iter().map(|(drawn, scored)| (drawn - scored).abs()).fold(0.0, f64::max);
    assert!(apart < tolerance, "{apart}");
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

#[test]
fn a_court_ranks_objectives_on_the_samples_of_a_cycle() {
    let fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 20));
    fleet.await_success(&base, LIMIT);
    let run = fleet.submit(&files.write_raft_spec(&base, SAMPLING));
    fleet.await_success(&run, LIMIT);
    let court = [
        "court",
        &run,
        "--objectives",
        "raft,rloo,dr_grpo",
        "--set",
        "rloo.kl=0.01",
        "--seeds",
        "2",
    ];
    let ranking = fleet.run_json(&court).expect("a ranking");
    assert_eq!((&ranking["run"], &ranking["cycle"]), (&json!(run), &json!(2)));
    let places = ranking["ranking"].as_array().unwrap();
    let mut names: Vec<&str> =
        places.iter().map(|place| place["objective"].as_str().unwrap()).collect();
    let means: Vec<f64> = places.iter().map(|place| place["mean"].as_f64().unwrap()).collect();
    assert!(means.is_sorted_by(|a, b| a >= b), "{ranking:#}");
    names.sort_unstable();
    assert_eq!(names, ["dr_grpo", "raft", "rloo kl=0.01"]);
    let runs: Vec<&str> = places
        .iter()
        .flat_map(|place| place["runs"].as_array().unwrap())
        .map(|run| run[0].as_str().unwrap())
        .collect();
    assert_eq!(runs.len(), 6);
    for trial in &runs {
        fleet.assert_clean_audit(trial);
        let drawn = fleet.read_facts(trial);
        let trains = |fact: &Value| fact["fact"]["purpose"] == "TRAIN";
        assert!(!drawn.iter().any(trains), "{trial} draws training samples again");
        let shown = fleet.run_json(&["run", "show", trial]).expect("a run");
        assert_eq!(shown["trialOf"], json!(format!("{run}@2")));
        let explained = fleet.run_json(&["run", "explain", trial]).expect("an explanation");
        let base = explained["base"].as_str().unwrap();
        assert!(base.contains(" with runs/"), "{base}");
    }
    // The same court finds its runs again.
    let again = fleet.run_json(&court).expect("a ranking");
    assert_eq!(again, ranking);
    fleet
        .run(&["court", &run, "--objectives", "raft", "--cycle", "7"])
        .assert_refused(&["has no cycle 7; its last one is"]);
    fleet
        .run(&["court", &run, "--objectives", "raft", "--set", "dapo.kl=1"])
        .assert_refused(&["dapo is none of the --objectives"]);
}
