//! Trainings that train, and those that do not.

use std::{path::PathBuf, time::Duration};

use e2e::{Files, Fleet, Sampling};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(180);

/// At most as many kept as a batch has: each cycle is one step.
const ONE_STEP: Sampling = Sampling { prompts: 8, per_prompt: 8, max_new_tokens: 24, cycles: 2 };

/// A spec with something in it replaced.
fn changed(spec: PathBuf, from: &str, to: &str) -> PathBuf {
    let text = std::fs::read_to_string(&spec).expect("a spec");
    assert!(text.contains(from), "{text}");
    std::fs::write(&spec, text.replace(from, to)).expect("a spec");
    spec
}

fn number(checkpoint: &Value, field: &str) -> f64 {
    let value = &checkpoint[field];
    // 64-bit counts are texts in protobuf's JSON.
    let number = value.as_f64().or_else(|| value.as_str()?.parse().ok());
    number.unwrap_or_else(|| panic!("{field} in {checkpoint:#}"))
}

#[test]
fn a_cycle_of_one_step_trains_at_the_whole_rate_and_changes_the_weights() {
    let fleet = Fleet::up("trainer,generator,verifier,evaluator");
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(20, 0));
    fleet.finish(&base, LIMIT);
    let run = fleet.submit(&files.raft(&base, ONE_STEP));
    let ended = fleet.finish(&run, LIMIT);
    let checkpoints = ended["checkpoints"].as_array().unwrap();
    // What is 0 is left out of protobuf's JSON.
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
    fleet.audit_clean(&run);

    let shown = fleet.run(&["checkpoint", "get", &format!("{run}/2")]);
    let told = ["completion tokens of", "batches 100 % full", "weights changed by", "rate 1e-3"];
    assert!(told.iter().all(|part| shown.stdout.contains(part)), "{}", shown.stdout);
}

#[test]
fn a_training_that_changed_nothing_ends_its_run_and_says_why() {
    let fleet = Fleet::up("trainer,evaluator");
    let files = Files::create(fleet.path());
    let model = files.model();
    let spec = files.adapter_sft(&model, 3, 0);
    let spec = changed(spec, "learning_rate: 0.003", "learning_rate: 0.000000000001");
    let run = fleet.submit(&spec);
    let ended = fleet.end(&run, "FAILED", LIMIT);
    let why = ended["message"].as_str().unwrap();
    let told = ["check weights-changed: 3 steps", "raise training.learning_rate"];
    assert!(told.iter().all(|part| why.contains(part)), "{why}");
    assert_eq!(ended["failures"].as_array().map(Vec::len), Some(1), "it is not tried again");
    assert!(ended["checkpoints"].is_null(), "nothing was published: {ended:#}");

    let long = changed(files.adapter_sft(&model, 3, 0), "max_tokens: 64", "max_tokens: 6");
    let ended = fleet.end(&fleet.submit(&long), "FAILED", LIMIT);
    let why = ended["message"].as_str().unwrap();
    assert!(why.contains("all 50 examples are longer than the 6 tokens allowed"), "{why}");
    assert_eq!(ended["failures"].as_array().map(Vec::len), Some(1), "it is not tried again");
}

#[test]
fn a_training_is_done_again_to_the_same_bits_or_is_told_to_differ() {
    let fleet = Fleet::up("trainer,generator,verifier,evaluator");
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(20, 5));
    fleet.finish(&base, LIMIT);
    let run = fleet.submit(&files.raft(&base, ONE_STEP));
    fleet.finish(&run, LIMIT);

    let again = |checkpoint: &str, more: &[&str]| {
        let asked = ["--json", "run", "reproduce", checkpoint];
        let output = fleet.run(&[&asked, more].concat());
        let told = serde_json::from_str::<Value>(&output.stdout);
        (output.code, told.unwrap_or_else(|_| panic!("{checkpoint}: {}", output.stderr)))
    };
    for checkpoint in [&base, &format!("{base}/0/10"), &format!("{run}/2")] {
        let (code, told) = again(checkpoint, &[]);
        assert_eq!((code, &told["same"]), (0, &Value::Bool(true)), "{told:#}");
        assert_eq!(told["here"], told["there"]);
        assert_eq!(told["engine"]["here"], told["engine"]["there"]);
    }
    // Weights held in half the bits are others.
    let (code, told) = again(&format!("{run}/2"), &["--dtype", "bf16"]);
    assert_eq!((code, &told["same"]), (3, &Value::Bool(false)), "{told:#}");
    assert_eq!(told["differing"], serde_json::json!(["adapter_model.safetensors"]));
    let distance = told["distance"].as_f64().expect("a distance");
    assert!((1e-6..0.5).contains(&distance), "{distance}");

    let adopted = fleet.run(&["run", "reproduce", &format!("{run}/0")]);
    adopted.refuses(&["it was not trained by this fleet"]);
}
