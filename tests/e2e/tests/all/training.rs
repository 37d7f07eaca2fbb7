//! Trainings that change the weights, and trainings that do not.

use std::{path::PathBuf, time::Duration};

use e2e::{Fleet, Sampling, SpecFiles};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(180);

/// A cycle keeps at most one batch, so it trains one step.
const ONE_STEP: Sampling = Sampling { prompts: 8, per_prompt: 8, max_new_tokens: 24, cycles: 2 };

/// Replaces a text in a spec.
fn replace_in_spec(spec: PathBuf, from: &str, to: &str) -> PathBuf {
    let text = std::fs::read_to_string(&spec).expect("a spec");
    assert!(text.contains(from), "{text}");
    std::fs::write(&spec, text.replace(from, to)).expect("a spec");
    spec
}

fn number(checkpoint: &Value, field: &str) -> f64 {
    let value = &checkpoint[field];
    // JSON contains 64-bit counts as strings.
    let number = value.as_f64().or_else(|| value.as_str()?.parse().ok());
    number.unwrap_or_else(|| panic!("{field} in {checkpoint:#}"))
}

#[test]
fn a_cycle_of_one_step_trains_at_the_whole_rate_and_changes_the_weights() {
    let fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 0));
    fleet.await_success(&base, LIMIT);
    let run = fleet.submit(&files.write_raft_spec(&base, ONE_STEP));
    let ended = fleet.await_success(&run, LIMIT);
    let checkpoints = ended["checkpoints"].as_array().unwrap();
    // JSON omits fields that are 0.
    let is_trained = |checkpoint: &&Value| checkpoint["cycle"].as_u64() > Some(0);
    let trained: Vec<&Value> =
        checkpoints.iter().map(|info| &info["checkpoint"]).filter(is_trained).collect();
    assert_eq!(trained.len(), 2, "{checkpoints:#?}");
    for checkpoint in &trained {
        assert_eq!(checkpoint["steps"], 1, "{checkpoint:#}");
        assert_eq!(number(checkpoint, "learningRate"), 0.001);
        assert!(number(checkpoint, "weightChange") > 1e-4, "{checkpoint:#}");
        assert!(number(checkpoint, "gradNorm") > 0.0, "{checkpoint:#}");
        assert_eq!(number(checkpoint, "gradNorm"), number(checkpoint, "gradNormMax"));
        assert_eq!(number(checkpoint, "packing"), 1.0);
        let (answers, all) = (number(checkpoint, "trainedTokens"), number(checkpoint, "tokens"));
        assert!(0.0 < answers && answers < all, "{checkpoint:#}");
    }
    assert_ne!(trained[0]["tree"]["manifest"], trained[1]["tree"]["manifest"]);
    assert_eq!(trained[1]["parent"]["manifest"], trained[0]["tree"]["manifest"]);
    fleet.assert_clean_audit(&run);

    let shown = fleet.run(&["checkpoint", "get", &format!("{run}/2")]);
    let expected =
        ["completion tokens of", "batches 100 % full", "weights changed by", "rate 1e-3"];
    assert!(expected.iter().all(|part| shown.stdout.contains(part)), "{}", shown.stdout);
}

#[test]
fn a_training_that_changes_nothing_fails_its_run_with_a_reason() {
    let fleet = Fleet::start("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model();
    let spec = files.write_adapter_spec(&model, 3, 0);
    let spec = replace_in_spec(spec, "learning_rate: 0.003", "learning_rate: 0.000000000001");
    let run = fleet.submit(&spec);
    let ended = fleet.await_state(&run, "FAILED", LIMIT);
    let why = ended["message"].as_str().unwrap();
    let expected = ["check weights-changed: 3 steps", "raise training.learning_rate"];
    assert!(expected.iter().all(|part| why.contains(part)), "{why}");
    assert_eq!(ended["failures"].as_array().map(Vec::len), Some(1), "it is not tried again");
    assert!(ended["checkpoints"].is_null(), "nothing was published: {ended:#}");

    let long =
        replace_in_spec(files.write_adapter_spec(&model, 3, 0), "max_tokens: 64", "max_tokens: 6");
    let ended = fleet.await_state(&fleet.submit(&long), "FAILED", LIMIT);
    let why = ended["message"].as_str().unwrap();
    assert!(why.contains("all 50 examples are longer than the 6 tokens allowed"), "{why}");
    assert_eq!(ended["failures"].as_array().map(Vec::len), Some(1), "it is not tried again");
}

#[test]
fn a_training_is_reproduced_bit_for_bit_or_its_differences_are_reported() {
    let fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 5));
    fleet.await_success(&base, LIMIT);
    let run = fleet.submit(&files.write_raft_spec(&base, ONE_STEP));
    fleet.await_success(&run, LIMIT);

    let reproduce = |checkpoint: &str, more: &[&str]| {
        let command = ["--json", "run", "reproduce", checkpoint];
        let output = fleet.run(&[&command, more].concat());
        let report = serde_json::from_str::<Value>(&output.stdout);
        (output.code, report.unwrap_or_else(|_| panic!("{checkpoint}: {}", output.stderr)))
    };
    for checkpoint in [&base, &format!("{base}/0/10"), &format!("{run}/2")] {
        let (code, report) = reproduce(checkpoint, &[]);
        assert_eq!((code, &report["same"]), (0, &Value::Bool(true)), "{report:#}");
        assert_eq!(report["here"], report["there"]);
        assert_eq!(report["engine"]["here"], report["engine"]["there"]);
    }
    // Half-precision weights give other results.
    let (code, report) = reproduce(&format!("{run}/2"), &["--dtype", "bf16"]);
    assert_eq!((code, &report["same"]), (3, &Value::Bool(false)), "{report:#}");
    assert_eq!(report["differing"], serde_json::json!(["adapter_model.safetensors"]));
    let distance = report["distance"].as_f64().expect("a distance");
    assert!((1e-6..0.5).contains(&distance), "{distance}");

    let adopted = fleet.run(&["run", "reproduce", &format!("{run}/0")]);
    adopted.assert_refused(&["it was not trained by this fleet"]);
}
