//! An engine that does not load the ordered adapter. Its samples look like all others.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use e2e::{
    Fleet, Sampling, SpecFiles, find_llama_cpp, start_llama_generator, wait_until, write_llama_cpp,
};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(240);

/// Makes a server silently ignore adapters.
const DROP_ADAPTER: &str = "left=$#; while [ $left -gt 0 ]; do one=$1; shift; left=$((left - 1)); \
                            if [ \"$one\" = --lora ]; then shift; left=$((left - 1)); \
                            else set -- \"$@\" \"$one\"; fi; done";

fn facts_of_kind<'a>(facts: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    let is = move |fact: &&Value| fact["subject"].as_str().unwrap().contains(kind);
    facts.iter().filter(is).map(|fact| &fact["fact"])
}

#[test]
fn an_agent_that_samples_without_the_adapter_is_quarantined_and_others_redraw_its_samples() {
    let Some(directory) = find_llama_cpp() else { return };
    // One sample at a time, so that the other generator gets jobs too.
    let slow = ("FLOTILLA_SLOTS".to_owned(), "1".to_owned());
    let fleet = Fleet::start_with("trainer,generator,verifier,evaluator", &["--open"], [slow]);
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 0));
    fleet.await_success(&base, LIMIT);
    let stale = write_llama_cpp(&fleet.path().join("stale"), &directory, DROP_ADAPTER);
    let agent = start_llama_generator(&fleet, &stale, "stale");
    wait_until("the agent is ready", Duration::from_secs(60), || {
        let agents = fleet.run_json(&["agents", "list"]).ok()?;
        let found = |agent: &&Value| agent["agent"] == "stale" && agent["state"] == "READY";
        agents.as_array()?.iter().find(found).map(|_| ())
    });

    let sampling = Sampling { prompts: 96, per_prompt: 8, max_new_tokens: 48, cycles: 2 };
    let spec = files.write_raft_spec(&base, sampling);
    let text = std::fs::read_to_string(&spec).unwrap();
    std::fs::write(&spec, format!("{text}  proof: {{ canary: true }}\n")).unwrap();
    let run = fleet.submit(&spec);
    fleet.await_success(&run, LIMIT);

    let facts = fleet.read_facts(&run);
    let found: Vec<&Value> = facts_of_kind(&facts, ".quarantine.").collect();
    assert!(!found.is_empty(), "it was not found out\n{}", fleet.log_tails());
    for found in &found {
        // With the base alone its samples are correct, although its engine rounds differently.
        assert_eq!(found["agent"], "stale", "{found:#}");
        assert!(found["adapter"].as_str().unwrap().starts_with("b3:"), "{found:#}");
        let (apart, allowed) = (found["distance"].as_f64(), found["tolerance"].as_f64());
        assert!(apart.unwrap() > 2.0 * allowed.unwrap(), "{found:#}");
    }
    let story = fleet.run_json(&["run", "explain", &run, "--cycle", "1"]).unwrap();
    let shown = story["proof"]["shown"].as_array().unwrap();
    println!("of the base, by two engines: {shown:#?}");
    assert_eq!(shown.len(), 2, "both sampled with the base: {story:#}");
    let near = |figure: &Value| figure["distance"].as_f64().unwrap() < 0.01;
    assert!(shown.iter().all(near), "engines that round otherwise agree: {story:#}");
    for samples in facts_of_kind(&facts, ".samples.") {
        let canary = samples["canary"].as_array().unwrap();
        assert_eq!(canary.len(), 32, "{samples:#}");
        assert!(samples["tokenizer"].as_str().unwrap().starts_with("b3:"), "{samples:#}");
    }
    let done = facts_of_kind(&facts, ".cycle.2.done").next().unwrap();
    assert!(done["samplesByAgent"]["stale"].is_null(), "{done:#}");
    assert_eq!(done["sampled"], 96 * 8, "and none is missing: {done:#}");
    fleet.assert_clean_audit(&run);

    let status = wait_until("the agent reports its quarantine", Duration::from_secs(30), || {
        let agents = fleet.run_json(&["agents", "list"]).ok()?;
        let found = |agent: &&Value| agent["agent"] == "stale" && agent["state"] == "QUARANTINED";
        agents.as_array()?.iter().find(found).cloned()
    });
    let trouble = status["trouble"].as_str().unwrap();
    assert!(trouble.contains("wrong weights loaded"), "{trouble}");
    let story = fleet.run(&["run", "explain", &run]).stdout;
    assert!(story.contains("stale is in quarantine"), "{story}");
    assert!(story.contains("trainer of 1"), "{story}");
    drop(agent);
}
