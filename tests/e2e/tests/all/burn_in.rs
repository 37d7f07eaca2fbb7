//! `flotilla doctor burn-in`: a box through all of its work, and the report.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use e2e::{Output, find_llama_cpp, find_llama_cpp_with_vulkan, run_flotilla, write_llama_cpp};
use serde_json::Value;

const STAGES: [&str; 10] = [
    "host",
    "llama.cpp",
    "base",
    "train",
    "publish",
    "convert",
    "serve",
    "canary",
    "evaluate",
    "storm",
];

/// Burns this machine in as a box without a GPU. Returns the output and the report.
fn burn_in(programs: &str, more: &[&str]) -> (Output, Value) {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("report.json");
    let fixed = ["doctor", "burn-in", "--profile", "cpu", "--llama-cpp", programs];
    // Other tests run meanwhile.
    let limits = ["--stage-limit", "600", "--limit", "3600"];
    let fixed = [&fixed[..], &limits[..], &["--out", out.to_str().unwrap()]].concat();
    let output = run_flotilla(&[&fixed[..], more].concat(), []);
    let report = std::fs::read(&out).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output, serde_json::from_slice(&report).unwrap())
}

fn stage<'a>(report: &'a Value, name: &str) -> &'a Value {
    let stages = report["stages"].as_array().unwrap();
    stages.iter().find(|stage| stage["name"] == name).unwrap_or_else(|| panic!("{name}"))
}

fn outcomes(report: &Value) -> Vec<(&str, &str)> {
    let stages = report["stages"].as_array().unwrap().iter();
    stages.map(|it| (it["name"].as_str().unwrap(), it["outcome"].as_str().unwrap())).collect()
}

fn assert_all_passed(output: &Output, report: &Value) {
    // A kernel may count no TLB shootdowns.
    let expected = STAGES.map(|name| (name, "passed"));
    let found = outcomes(report);
    assert_eq!(found[..9], expected[..9], "{output:?}\n{report:#}");
    assert!(matches!(found[9], ("storm", "passed" | "skipped")), "{report:#}");
    assert_eq!((output.code, report["passed"].as_bool()), (0, Some(true)), "{output:?}");
    for name in STAGES {
        assert!(output.stdout.contains(name), "{}", output.stdout);
    }
}

fn figure(report: &Value, name: &str, figure: &str) -> f64 {
    let stage = stage(report, name);
    stage["figures"][figure].as_f64().unwrap_or_else(|| panic!("{name} {figure}: {stage:#}"))
}

#[test]
fn a_box_without_a_gpu_passes_every_stage_with_figures() {
    let Some(programs) = find_llama_cpp() else { return };
    let (output, report) = burn_in(&programs, &[]);
    assert_all_passed(&output, &report);
    assert!((figure(&report, "train", "steps") - 20.0).abs() < 0.5, "{report:#}");
    for (name, key) in [
        ("train", "steps_per_s"),
        ("train", "weight_change"),
        ("publish", "bytes"),
        ("convert", "base_bytes"),
        ("convert", "adapter_bytes"),
        ("serve", "tokens_per_s"),
        ("evaluate", "peak_rss_bytes"),
    ] {
        assert!(figure(&report, name, key) > 0.0, "{name} {key}");
    }
    let perplexities =
        ["perplexity", "perplexity_embedded"].map(|key| figure(&report, "evaluate", key));
    assert!((perplexities[0] / perplexities[1] - 1.0).abs() < 0.02, "{perplexities:?}");
    // Bytes that are drawn evenly have 256; the text was learnt.
    assert!(perplexities[0] < 30.0, "{perplexities:?}");
    let canary = stage(&report, "canary");
    let names = "llama.cpp on the CPU and the embedded engine";
    assert_eq!(canary["figures"]["compared"], names, "{canary:#}");
    assert!(report["host"]["kernel"]["release"].is_string(), "{report:#}");
    assert!(report["engines"]["llama.cpp"].is_string(), "{report:#}");
}

#[test]
fn a_device_is_compared_with_the_cpu() {
    let Some(programs) = find_llama_cpp_with_vulkan() else { return };
    // Mesa's software Vulkan errs by 0.1 to 0.2 nats per token, up and down: perplexities are equal.
    let (output, report) = burn_in(&programs, &["--tolerance", "0.5"]);
    assert_all_passed(&output, &report);
    let canary = stage(&report, "canary");
    assert_eq!(canary["figures"]["compared"], "Vulkan0 and the CPU", "{canary:#}");
    assert!(figure(&report, "canary", "mean_difference_nats") > 0.0, "{canary:#}");
    let ratio = figure(&report, "evaluate", "gpu_to_cpu");
    assert!((0.98..=1.02).contains(&ratio), "{ratio}");
    let (refused, strict) = burn_in(&programs, &["--tolerance", "0"]);
    assert_eq!(refused.code, 3, "{refused:?}");
    let canary = stage(&strict, "canary");
    assert_eq!(canary["outcome"], "failed", "{canary:#}");
    assert!(canary["reason"].as_str().unwrap().contains("(E106)"), "{canary:#}");
    assert!(canary["figures"]["largest_difference_nats"].is_number(), "{canary:#}");
}

/// Makes a server die as soon as it has a model.
const DIE: &str = "case \"$*\" in *--model*) echo no memory >&2; exit 1;; esac";

#[test]
fn a_stage_that_fails_is_named_and_stops_no_other() {
    let Some(programs) = find_llama_cpp() else { return };
    let directory = tempfile::tempdir().unwrap();
    let broken = write_llama_cpp(directory.path(), &programs, DIE);
    let (output, report) = burn_in(&broken, &[]);
    assert_eq!(output.code, 3, "{output:?}");
    assert_eq!(report["passed"], false);
    let outcome = |name: &str| stage(&report, name)["outcome"].as_str().unwrap().to_owned();
    let named = ["convert", "serve", "canary", "evaluate"].map(outcome);
    assert_eq!(named, ["passed", "failed", "skipped", "passed"], "{report:#}");
    let reason = stage(&report, "serve")["reason"].as_str().unwrap();
    assert!(reason.contains("(E10"), "{reason}");
    assert!(output.stdout.contains("FAILED"), "{}", output.stdout);
}
