//! A remote store, wrong input, and other surroundings of a fleet.

use std::{process::Command, time::Duration};

use e2e::{Fleet, Sampling, SpecFiles, program_path};
use s3_server::S3Server;

const LIMIT: Duration = Duration::from_secs(180);

#[test]
fn a_fleet_keeps_its_files_in_s3() {
    let server = S3Server::start().unwrap();
    let agents = "trainer,generator,verifier,evaluator";
    let fleet = Fleet::start_with(agents, &["--store", &server.url()], server.env());
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(10, 0));
    fleet.await_success(&base, LIMIT);
    let small = Sampling { prompts: 8, per_prompt: 4, max_new_tokens: 16, cycles: 1 };
    let run = fleet.submit(&files.write_raft_spec(&base, small));
    fleet.await_success(&run, LIMIT);
    fleet.assert_clean_audit(&run);
    assert!(!fleet.path().join("store").exists(), "nothing is kept here");
}

#[test]
fn wrong_input_is_one_clear_error_and_starts_nothing() {
    let fleet = Fleet::start("trainer");
    let files = SpecFiles::create(fleet.path());
    let spec = files.write_sft_spec(5, 0);
    let good = std::fs::read_to_string(&spec).unwrap();
    let cases = [
        (good.replace("max_steps", "max_stepz"), "max_stepz"),
        (good.replace("data.jsonl", "nothing.jsonl"), "nothing.jsonl"),
        (good.replace("n_ctx: 64", "n_ctx: 1"), "evals[0].n_ctx"),
        (good.replace("data: data.jsonl", "data: heldout.txt"), "line 1"),
        (good.replace("sft:", "stf:"), "stf"),
    ];
    for (text, named) in cases {
        std::fs::write(&spec, text).unwrap();
        let refused = fleet.run(&["run", "submit", spec.to_str().unwrap()]);
        assert_eq!(refused.code, 1, "{}", refused.stderr);
        assert!(refused.stderr.contains(named), "{named}: {}", refused.stderr);
    }
    assert_eq!(fleet.run_json(&["run", "list"]).unwrap(), serde_json::json!([]));
}

#[test]
fn an_unreachable_fleet_is_named() {
    let unreachable = Command::new(program_path())
        .args(["run", "list", "--nats", "nats://127.0.0.1:1"])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&unreachable.stderr);
    assert_eq!(unreachable.status.code(), Some(1));
    assert!(stderr.contains("127.0.0.1:1"), "{stderr}");
    let unnamed = Command::new(program_path()).args(["run", "list"]).output().unwrap();
    let stderr = String::from_utf8_lossy(&unnamed.stderr);
    assert!(stderr.contains("--dir") && stderr.contains("FLOTILLA_NATS"), "{stderr}");
}

#[test]
fn a_drained_agent_is_shown_as_stopped() {
    let fleet = Fleet::start("trainer,generator=2");
    assert_eq!(fleet.run(&["agents", "drain", "generator-2"]).code, 0);
    e2e::wait_until("the agent has stopped", LIMIT, || {
        let agents = fleet.run_json(&["agents", "list"]).ok()?;
        let is_it = |agent: &&serde_json::Value| agent["agent"] == "generator-2";
        let agent = agents.as_array()?.iter().find(is_it)?.clone();
        (agent["state"] == "STOPPED").then_some(())
    });
    let unknown = fleet.run(&["agents", "drain", "nobody"]);
    assert_eq!(unknown.code, 1);
    assert!(unknown.stderr.contains("there is no agent nobody"), "{}", unknown.stderr);
}

#[test]
fn golden_perplexities_are_reproduced() {
    for set in golden::golden_sets() {
        let expected = set.first_chunks("qwen2-tiny", None);
        let output = Command::new(program_path())
            .args(["eval", "local", "--chunks", "8", "--json", "--model"])
            .arg(set.model_path(&expected.model))
            .arg("--text")
            .arg(set.text_path(&expected.text))
            .output()
            .unwrap();
        let figures: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let number = |name: &str| figures[name].as_f64().unwrap();
        golden::assert_printed(number("perplexity"), &expected.perplexity, "perplexity");
        let stderr = expected.stderr.as_deref().unwrap();
        golden::assert_printed(number("stderr"), stderr, "standard error");
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let directory = tempfile::tempdir().unwrap();
    let into = directory.path().join("man1");
    let written = Command::new(program_path()).arg("man").arg(&into).output().unwrap();
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    let page = |name: &str| std::fs::read_to_string(into.join(name)).expect(name);
    assert!(page("flotilla.1").contains("flotilla\\-run"), "it names the commands");
    let submit = page("flotilla-run-submit.1");
    assert!(submit.starts_with(".ie") && submit.contains(".TH"), "it is troff: {submit}");
    assert!(submit.contains("spec"), "it has the command's help: {submit}");
    assert!(!into.join("flotilla-worker.1").exists(), "what is hidden has none");
}
