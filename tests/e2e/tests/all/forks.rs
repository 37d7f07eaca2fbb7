//! Runs that continue another one after a cycle.

use std::time::{Duration, Instant};

use e2e::{Fleet, Sampling, SpecFiles};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(240);

const SAMPLING: Sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 24, cycles: 3 };

fn fork(fleet: &Fleet, arguments: &[&str]) -> String {
    let began = Instant::now();
    let forked = fleet.run(&[&["run", "fork"], arguments].concat());
    assert_eq!(forked.code, 0, "{arguments:?}: {}", forked.stderr);
    println!("run fork {arguments:?}: {:?} with a new process", began.elapsed());
    forked.stdout.trim().to_owned()
}

/// Manifest digest of the last checkpoint of each cycle.
fn checkpoint_digests(fleet: &Fleet, run: &str) -> Vec<String> {
    let listed = fleet.run_json(&["checkpoint", "list", run]).expect("a list");
    let listed = listed.as_array().expect("a list");
    let last = listed.iter().filter(|it| it["checkpoint"]["final"] == true);
    last.map(|it| it["checkpoint"]["tree"]["manifest"].as_str().expect("a digest").to_owned())
        .collect()
}

#[test]
fn a_fork_shares_what_was_done_and_ends_alike_unless_a_setting_changes() {
    // Of done cycles, the log keeps no samples.
    let agents = "trainer,generator=2,verifier,evaluator";
    let fleet = Fleet::start_with(agents, &["--keep-cycles", "0"], []);
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 0));
    fleet.await_success(&base, LIMIT);
    let refused = fleet.run(&["run", "fork", &format!("{base}@0")]);
    assert!(refused.code == 1 && refused.stderr.contains("is not a RAFT run"), "{refused:?}");
    fleet.run(&["run", "samples", base.as_str()]).assert_refused(&["draws and selects no samples"]);
    let parent = fleet.submit(&files.write_raft_spec(&base, SAMPLING));
    fleet.await_success(&parent, LIMIT);
    let digests = checkpoint_digests(&fleet, &parent);
    assert_eq!(digests.len(), 4, "{digests:?}");

    let same = fork(&fleet, &[&format!("{parent}@1")]);
    fleet.await_success(&same, LIMIT);
    assert_eq!(checkpoint_digests(&fleet, &same), digests);
    for fact in fleet.read_facts(&same) {
        let subject = fact["subject"].as_str().expect("a subject");
        let earlier = [0, 1].map(|cycle| format!("flotilla.{same}.cycle.{cycle}."));
        assert!(!earlier.iter().any(|it| subject.starts_with(it)), "{subject} was written again");
    }
    fleet.assert_clean_deep_audit(&same);
    check_reports(&fleet, &parent, &same);

    let change = "raft.training.learning_rate=1e-4";
    let forked = format!("{parent}@1");
    let other = fork(&fleet, &[&forked, "--set", change, "--set", "cycles=2", "--name", "slow"]);
    assert_eq!(other, "slow-1");
    fleet.await_success(&other, LIMIT);
    let changed = checkpoint_digests(&fleet, &other);
    assert_eq!((changed.len(), &changed[..2]), (3, &digests[..2]));
    assert_ne!(changed[2], digests[2]);
    fleet.assert_clean_deep_audit(&other);

    // A fork of a fork, after a cycle of its own, and after one that it took over.
    for cycle in [2, 0] {
        let last = fork(&fleet, &[&format!("{same}@{cycle}")]);
        fleet.await_success(&last, LIMIT);
        assert_eq!(checkpoint_digests(&fleet, &last), digests, "after cycle {cycle}");
        fleet.assert_clean_audit(&last);
    }
    let refused = fleet.run(&["run", "fork", &format!("{same}@3")]);
    assert!(refused.stderr.contains("set raft.cycles=4 (R103)"), "{refused:?}");
}

/// The reports on a fork cover the cycles that it took over.
fn check_reports(fleet: &Fleet, parent: &str, forked: &str) {
    let shown = fleet.run(&["run", "show", forked]).stdout;
    assert!(shown.contains(&format!("continues {parent}@1")), "{shown}");
    let samples = |run: &str| {
        let shown = fleet.run(&["run", "samples", run, "--cycle", "1", "--limit", "100"]);
        assert_eq!(shown.code, 0, "{}", shown.stderr);
        shown.stdout
    };
    assert_eq!(samples(forked), samples(parent));
    let explain = |run: &str, cycle: &str| {
        let story = fleet.run_json(&["run", "explain", run, "--cycle", cycle]).expect("a story");
        story["yield"].clone()
    };
    assert_eq!(explain(forked, "1"), explain(parent, "1"));
    assert_eq!(explain(forked, "2")["kept"], explain(parent, "2")["kept"]);
    let lineage = fleet.run_json(&["checkpoint", "explain", &format!("{forked}/3")]);
    let lineage = lineage.expect("a lineage");
    let trained = |link: &Value| !link["order"].is_null();
    let links = lineage["links"].as_array().expect("a list");
    assert!(links.len() == 3 && links.iter().all(trained), "{lineage:#}");
    for cycle in [1, 2] {
        let again = fleet.run(&["run", "reproduce", &format!("{forked}/{cycle}")]);
        assert_eq!(again.code, 0, "cycle {cycle}: {again:?}");
        assert!(again.stdout.contains("reproduced bit for bit"), "cycle {cycle}: {again:?}");
    }
    let differences = fleet.run(&["run", "diff", parent, forked]).stdout;
    assert!(differences.contains("fork.cycle"), "{differences}");
}
