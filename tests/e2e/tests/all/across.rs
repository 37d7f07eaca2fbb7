//! Trainings of one adapter on several boxes.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use e2e::{Fleet, Random, Sampling, SpecFiles, wait_until};
use rustix::process::Signal;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(300);

/// Writes the spec of an adapter's training with settings of `training.across`.
fn write_spec(
    files: &SpecFiles,
    model: &Path,
    (steps, save_every): (u32, u32),
    across: &str,
) -> PathBuf {
    let path = files.write_adapter_spec(model, steps, save_every);
    let spec = std::fs::read_to_string(&path).expect("a spec");
    let spec = spec.replace("max_tokens: 64,", &format!("max_tokens: 64, {across}"));
    std::fs::write(&path, spec).expect("a spec");
    path
}

/// Returns the bytes of the tensors of a run's final checkpoint.
fn final_weights(fleet: &Fleet, ended: &Value) -> Vec<u8> {
    let last =
        &ended["checkpoints"].as_array().expect("a list").last().expect("a last one")["checkpoint"];
    let tree = fleet.path().join("store").join(last["tree"]["path"].as_str().expect("a text"));
    std::fs::read(tree.join("adapter_model.safetensors")).expect("a text")
}

fn facts_of(fleet: &Fleet, run: &str, kind: &str) -> Vec<Value> {
    let all = fleet.read_facts(run);
    let prefix = format!("flotilla.{run}.{kind}.");
    let of_kind = |fact: &Value| fact["subject"].as_str().expect("a text").starts_with(&prefix);
    all.into_iter().filter(of_kind).map(|fact| fact["fact"].clone()).collect()
}

/// Waits until a run that has not ended has a fact.
fn await_subject(fleet: &Fleet, run: &str, key: &str) {
    let subject = format!("flotilla.{run}.{key}");
    fleet.await_fact(run, |fact| fact["subject"] == subject);
}

/// Returns the names in a directory; none if it is missing.
fn directories(parent: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().into_string().expect("a text")).collect()
}

/// Returns the newest outer step whose weights are in the store.
fn newest_merge(fleet: &Fleet, run: &str) -> u32 {
    let merges = fleet.path().join("store/runs").join(run).join("merges");
    let outer = |name: &String| name.strip_prefix("c0-o")?.split('-').next()?.parse().ok();
    directories(&merges).iter().filter_map(outer).max().unwrap_or(0)
}

#[test]
fn one_box_alone_gives_the_weights_of_a_training_that_is_not_merged() {
    let fleet = Fleet::start("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model();
    let alone = fleet.submit(&files.write_adapter_spec(&model, 20, 0));
    let alone = fleet.await_success(&alone, LIMIT);
    let across = "across: { every: 6 },";
    let merged = fleet.submit(&write_spec(&files, &model, (20, 8), across));
    let ended = fleet.await_success(&merged, LIMIT);
    assert_eq!(final_weights(&fleet, &alone), final_weights(&fleet, &ended), "the same bytes");
    let steps = |info: &Value| info["checkpoint"]["step"].as_u64().unwrap();
    let saved: Vec<u64> = ended["checkpoints"].as_array().unwrap().iter().map(steps).collect();
    assert_eq!(saved, [12, 18, 20], "merges after every 8 steps");
    fleet.assert_clean_audit(&merged);
    let states: Vec<bool> =
        facts_of(&fleet, &merged, "delta").iter().map(|delta| delta["state"].is_string()).collect();
    assert_eq!(states, [false, true, true, true], "the optimizer continues");
    let log = std::fs::read_to_string(fleet.path().join("agents/trainer-1/agent.log")).unwrap();
    let kept = log.matches("the process of the slice before trains this one").count();
    assert_eq!(kept, 4, "a new adapter and four slices in one process: {log}");
    let run = fleet.path().join("store/runs").join(&merged);
    assert!(directories(&run.join("deltas")).is_empty(), "merged weights are removed");
    assert_eq!(directories(&run.join("merges")).len(), 1);
}

#[test]
fn boxes_share_a_training_and_each_step_counts_once_although_processes_are_killed() {
    let mut fleet = Fleet::start("trainer=2,evaluator");
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model();
    let across = "across: { every: 200, merge: nesterov, outer: { rate: 0.7 } },";
    let run = fleet.submit(&write_spec(&files, &model, (6000, 0), across));
    for (member, outer) in [("trainer-2", 3), ("coordinator", 6), ("trainer-1", 8)] {
        wait_until("an outer step is merged", LIMIT, || {
            (newest_merge(&fleet, &run) >= outer).then_some(())
        });
        fleet.kill(member);
    }
    fleet.await_success(&run, LIMIT);
    fleet.assert_clean_deep_audit(&run);
    let deltas = facts_of(&fleet, &run, "delta");
    for agent in ["trainer-1", "trainer-2"] {
        assert!(deltas.iter().any(|delta| delta["agent"] == agent), "{agent}: {deltas:#?}");
    }
    let again = fleet.run(&["run", "reproduce", &run]);
    assert_eq!(again.code, 0, "{again:?}");
    assert!(again.stdout.contains("reproduced bit for bit"), "{}", again.stdout);
    let told = fleet.run(&["run", "explain", &run]).stdout;
    for words in ["trainer-1", "trainer-2", " merges; ", "times as fast as one box", "drift "] {
        assert!(told.contains(words), "{told}");
    }
    let momentum = |merge: &Value| merge["momentum"]["manifest"].is_string();
    assert!(facts_of(&fleet, &run, "merge")[1..].iter().all(momentum));
    fleet.await_agents();
}

/// Trains with one seed, kills a random process after every outer step but the first, and returns
/// the number of kills. An outer step has 2 000 steps.
fn train_with_kills(seed: u64, steps: u32) -> usize {
    let mut fleet = Fleet::start("trainer=2,evaluator");
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model();
    let across = "across: { every: 1000, merge: nesterov, outer: { rate: 0.7 } },";
    let spec = write_spec(&files, &model, (steps, 0), across);
    let text = std::fs::read_to_string(&spec).expect("a spec");
    std::fs::write(&spec, text.replace("seed: 5", &format!("seed: {seed}"))).expect("a spec");
    let run = fleet.submit(&spec);
    let (mut random, mut kills, mut seen) = (Random::new(seed), 0, 1);
    while fleet.ended_run(&run).is_none() {
        let newest = newest_merge(&fleet, &run);
        if newest == seen {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        seen = newest;
        std::thread::sleep(Duration::from_secs_f64(random.next_in_range(0.0, 0.8)));
        let member: &&str = random.pick(&["trainer-1", "trainer-2", "coordinator"]);
        fleet.kill(member);
        kills += 1;
    }
    fleet.await_success(&run, LIMIT);
    fleet.assert_clean_deep_audit(&run);
    let again = fleet.run(&["run", "reproduce", &run]);
    assert!(again.stdout.contains("reproduced bit for bit"), "seed {seed}: {again:?}");
    fleet.await_agents();
    kills
}

/// `FLOTILLA_ACROSS_SEEDS` is the number of long trainings; 7 take some 100 kills.
#[test]
fn a_training_comes_to_the_same_digest_after_a_kill_at_every_outer_step() {
    let seeds = std::env::var("FLOTILLA_ACROSS_SEEDS").ok().and_then(|text| text.parse().ok());
    let (seeds, steps, least) = match seeds {
        Some(seeds) => (seeds, 26_000, 10),
        None => (1, 8_000, 2),
    };
    let kills: Vec<usize> = (1..=seeds).map(|seed| train_with_kills(seed, steps)).collect();
    eprintln!("kills by seed: {kills:?}");
    assert!(kills.iter().all(|kills| *kills >= least), "{kills:?}");
}

#[test]
fn a_drained_box_leaves_its_slice_to_another_at_once() {
    let fleet = Fleet::start("trainer=2,evaluator");
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model();
    // Outer steps of 500 and 4000 steps a box, which takes longer than the drain.
    let run = fleet.submit(&write_spec(&files, &model, (9000, 0), "across: { every: 4000 },"));
    await_subject(&fleet, &run, "slices.0.2");
    assert_eq!(fleet.run(&["agents", "drain", "trainer-1"]).code, 0);
    let ended = fleet.await_success(&run, LIMIT);
    fleet.assert_clean_audit(&run);
    let deltas = facts_of(&fleet, &run, "delta");
    let is_late = |delta: &&Value| delta["outer"].as_u64().expect("a number") >= 2;
    let agents: Vec<&Value> = deltas.iter().filter(is_late).map(|delta| &delta["agent"]).collect();
    assert!(agents.iter().all(|agent| *agent == "trainer-2"), "{deltas:#?}");
    assert!(ended["failures"].as_array().is_none_or(Vec::is_empty), "{ended:#}");
}

#[test]
fn boxes_that_send_changes_derive_the_merges_even_if_one_has_lost_its_files() {
    let mut fleet = Fleet::start("trainer=2,evaluator");
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model();
    let outer = "merge: nesterov, outer: { rate: 0.7, momentum: 0.5 }";
    let across = format!("across: {{ every: 100, send_share: 0.05, {outer} }},");
    let run = fleet.submit(&write_spec(&files, &model, (4000, 0), &across));
    await_subject(&fleet, &run, "merge.0.5");
    let trainers = ["trainer-1", "trainer-2"];
    trainers.iter().for_each(|name| fleet.signal(name, Signal::STOP));
    std::fs::remove_dir_all(fleet.path().join("cache/trees")).expect("the cache of both");
    trainers.iter().for_each(|name| fleet.kill(name));
    let ended = fleet.await_success(&run, LIMIT);
    fleet.assert_clean_audit(&run);
    let merges = facts_of(&fleet, &run, "merge");
    let is_derived = |merge: &Value| merge["derived"] == true;
    assert!(merges.len() > 9, "{merges:#?}");
    for (number, merge) in merges.iter().enumerate() {
        let stored = number % 8 == 0 || number == merges.len() - 1;
        assert_eq!(is_derived(merge), !stored, "{number}: {merge:#?}");
    }
    let deltas = facts_of(&fleet, &run, "delta");
    let bytes = |delta: &Value| delta["bytes"].as_str().expect("bytes").parse::<u64>().unwrap();
    let adapter = u64::try_from(final_weights(&fleet, &ended).len()).unwrap();
    assert!(deltas.iter().all(|delta| bytes(delta) * 5 < adapter), "{adapter}: {deltas:#?}");
    let run_directory = fleet.path().join("store/runs").join(&run);
    // A box that dies between the fact of a merge and its end leaves what that merge would remove:
    // two changes of each of the eight merges since the last stored one, and that one's trees.
    let left = |kind: &str| directories(&run_directory.join(kind)).len();
    let (changes, trees) = (left("deltas"), left("merges"));
    assert!(changes == 0 && trees == 2 || changes <= 16 && trees <= 4, "{changes} {trees}");
    let again = fleet.run(&["run", "reproduce", &run]);
    assert_eq!(again.code, 0, "{again:?}");
    assert!(again.stdout.contains("reproduced bit for bit"), "{}", again.stdout);
    fleet.await_agents();
}

#[test]
fn stacked_adapters_are_merged_and_reproduced() {
    let fleet = Fleet::start("trainer=2,evaluator");
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model();
    let across = "across: { every: 100, merge: stack },";
    let run = fleet.submit(&write_spec(&files, &model, (800, 0), across));
    fleet.await_success(&run, LIMIT);
    fleet.assert_clean_audit(&run);
    let merges = facts_of(&fleet, &run, "merge");
    let lost = |merge: &Value| merge["residual"].as_f64().unwrap_or(0.0);
    assert!(merges.iter().any(|merge| lost(merge) > 0.0), "{merges:#?}");
    assert!(merges.iter().all(|merge| lost(merge) < 0.9), "{merges:#?}");
    let told = fleet.run(&["run", "explain", &run]).stdout;
    assert!(told.contains("lost to the rank") && told.contains("MB sent a slice"), "{told}");
    let again = fleet.run(&["run", "reproduce", &run]);
    assert_eq!(again.code, 0, "{again:?}");
}

#[test]
fn a_soup_is_one_merge_of_the_adapters_that_help() {
    let fleet = Fleet::start("trainer=2,evaluator");
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model();
    let path = write_spec(&files, &model, (60, 0), "across: { merge: soup },");
    let refused = fleet.run(&["run", "check", path.to_str().unwrap()]);
    assert!(refused.stderr.contains("sft.training.across.merge"), "{refused:?}");
    let spec = std::fs::read_to_string(&path).unwrap();
    let suite = "{ name: lines, text: lines.jsonl }";
    std::fs::write(&path, spec.replace("evals: [", &format!("evals: [{suite}, "))).unwrap();
    let lines =
        (0..20).map(|n| format!("{{\"prompt\": \"{n}+1=\", \"completion\": \"{}\"}}\n", n + 1));
    std::fs::write(path.with_file_name("lines.jsonl"), lines.collect::<String>()).unwrap();
    let run = fleet.submit(&path);
    fleet.await_success(&run, LIMIT);
    fleet.assert_clean_audit(&run);
    let merges = facts_of(&fleet, &run, "merge");
    let [new, soup] = merges.as_slice() else { panic!("{merges:#?}") };
    assert_eq!(new["totalSteps"], 60);
    assert!(soup["heldoutNll"].as_f64().unwrap() > 0.0, "{soup}");
    assert!(!soup["kept"].as_array().unwrap().is_empty(), "{soup}");
    let deltas = facts_of(&fleet, &run, "delta");
    let steps: Vec<_> = deltas.iter().map(|delta| delta["steps"].as_u64().unwrap()).collect();
    assert_eq!(steps, [30, 30]);
    let rates: Vec<_> = deltas.iter().map(|delta| delta["learningRate"].as_f64()).collect();
    assert_eq!(rates[0], rates[1], "each has its own schedule");
    let again = fleet.run(&["run", "reproduce", &run]);
    assert_eq!(again.code, 0, "{again:?}");
}

#[test]
fn each_cycle_of_a_raft_run_is_shared_and_continues_the_adapter_before() {
    let fleet = Fleet::start("trainer=2,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 0));
    fleet.await_success(&base, LIMIT);
    let sampling = Sampling { prompts: 16, per_prompt: 8, max_new_tokens: 24, cycles: 2 };
    let path = files.write_raft_spec(&base, sampling);
    let spec = std::fs::read_to_string(&path).unwrap();
    let across = "batch_size: 2, across: { every: 2, merge: average }";
    let spec = spec.replace("batch_size: 8", across);
    std::fs::write(&path, format!("{spec}  proof: {{ canary: true }}\n")).unwrap();
    let run = fleet.submit(&path);
    let ended = fleet.await_success(&run, LIMIT);
    fleet.assert_clean_audit(&run);
    let merged: Vec<(u64, u64)> = facts_of(&fleet, &run, "merge")
        .iter()
        .map(|merge| (merge["cycle"].as_u64().unwrap(), merge["outer"].as_u64().unwrap_or(0)))
        .collect();
    assert!(merged.contains(&(1, 0)) && merged.contains(&(2, 1)), "{merged:?}");
    assert!(!merged.contains(&(2, 0)), "the second cycle needs no new adapter: {merged:?}");
    let checkpoints = ended["checkpoints"].as_array().unwrap();
    let of_cycle = |cycle: u64| {
        let found = checkpoints.iter().map(|info| &info["checkpoint"]);
        found.into_iter().find(|it| it["cycle"].as_u64() == Some(cycle)).unwrap()
    };
    assert_eq!(of_cycle(2)["parent"]["manifest"], of_cycle(1)["tree"]["manifest"]);
    let saved = facts_of(&fleet, &run, "checkpoint");
    let is_scored = |saved: &&Value| saved["canary"].as_array().is_some_and(|it| !it.is_empty());
    assert_eq!(saved.iter().filter(is_scored).count(), 2, "the final ones: {saved:#?}");
    let again = fleet.run(&["run", "reproduce", &format!("{run}/2")]);
    assert_eq!(again.code, 0, "{again:?}");
}
