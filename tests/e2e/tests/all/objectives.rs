//! Runs that train with other objectives than the likelihood of the best samples.

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
    for (objective, reason) in
        [("rloo", ""), ("{dapo: {kl: 0.01}}", ""), ("{dpo: {nll: 0.1}}", "unpaired"), ("kto", "")]
    {
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
