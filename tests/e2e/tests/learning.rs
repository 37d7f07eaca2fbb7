//! The demo, as a user runs it: it must really learn.

use std::process::Command;

use e2e::binary;
use serde_json::Value;

#[test]
fn the_demo_learns_and_prints_one_json_document() {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(binary())
        .args(["demo", "--seed", "7", "--json", "--dir"])
        .arg(directory.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let told: Value = serde_json::from_slice(&output.stdout).expect("exactly one document");

    let checkpoints = told["checkpoints"].as_array().unwrap();
    let base: Vec<f64> = checkpoints
        .iter()
        .filter(|checkpoint| checkpoint["run"] == told["runs"][0])
        .map(|checkpoint| checkpoint["perplexity"].as_f64().unwrap())
        .collect();
    assert_eq!(base.len(), 10, "a checkpoint every 40 of 400 steps");
    // A perplexity of 1 is perfect.
    assert!(base[9] - 1.0 < (base[0] - 1.0) / 4.0, "perplexity falls: {base:?}");

    let cycles = told["cycles"].as_array().unwrap();
    let number = |cycle: usize, key: &str| cycles[cycle][key].as_f64().unwrap();
    assert_eq!(cycles.len(), 4);
    assert_eq!(cycles[0]["sampled"], 0);
    for cycle in &cycles[1..] {
        assert_eq!(cycle["sampled"], 2048);
        let agents = cycle["samples_by_agent"].as_object().unwrap();
        let made: u64 = agents.values().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!(made, 2048 + 600, "every sample is counted once");
    }
    let rates: Vec<f64> = (0..4).map(|cycle| number(cycle, "heldout_pass_rate")).collect();
    assert!(rates[3] > rates[0] + 0.2 && rates[3] > 0.75, "it learns: {rates:?}\n{stderr}");
    assert!(number(3, "heldout_perplexity") < number(0, "heldout_perplexity"));
}
