//! Backup of a running fleet, restore in another directory, and a store that moves.

use std::{path::Path, time::Duration};

use e2e::{Fleet, ReferenceResults, Sampling, SpecFiles, run_flotilla, unix_time_s, wait_until};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);
const SAMPLING: Sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 48, cycles: 2 };
/// Long enough for a backup in its first cycle.
const LONG: Sampling = Sampling { prompts: 96, per_prompt: 8, max_new_tokens: 320, cycles: 2 };
const AGENTS: &str = "trainer,generator=2,verifier,evaluator";

fn show_and_audit(fleet: &Fleet, run: &str) -> (Value, Value) {
    let shown = fleet.run_json(&["run", "show", run]).expect("a run");
    let audit = fleet.run_json(&["audit", run, "--no-store"]).expect("an audit");
    (shown, audit)
}

/// Copies the store, which is not part of a backup.
fn copy_store(from: &Path, to: &Path) {
    let status = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(status.expect("cp is there").success());
}

#[test]
fn a_fleet_continues_from_its_backup() {
    let elsewhere = tempfile::tempdir().unwrap();
    let backup = elsewhere.path().join("backup");
    let out = backup.display().to_string();
    let (base, before);
    {
        let fleet = Fleet::start("trainer,generator,verifier,evaluator");
        let files = SpecFiles::create(fleet.path());
        base = fleet.submit(&files.write_sft_spec(5, 0));
        fleet.await_success(&base, LIMIT);
        fleet.run(&["backup", "--out", &out]).assert_success();
        fleet.run(&["backup", "--out", &out]).assert_refused(&["is not empty"]);
        before = show_and_audit(&fleet, &base);
        copy_store(&fleet.path().join("store"), &elsewhere.path().join("store"));
    }
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().display().to_string();
    let restore = ["restore", "--dir", &at, "--from", &out];
    run_flotilla(&restore, []).assert_success();
    run_flotilla(&restore, []).assert_refused(&["is not empty"]);
    let store = format!("file://{}/store", elsewhere.path().display());
    let arguments = ["--store", &store];
    let fleet = Fleet::start_in(directory, "trainer,generator,verifier,evaluator", &arguments, []);
    assert_eq!(show_and_audit(&fleet, &base), before, "the same log, to the position");
    let files = SpecFiles::create(fleet.path());
    let raft = fleet.submit(&files.write_raft_spec(&base, SAMPLING));
    fleet.await_success(&raft, LIMIT);
    fleet.assert_clean_audit(&raft);
    fleet.assert_clean_audit(&base);
}

#[test]
fn a_run_ends_with_the_same_results_from_a_backup_that_was_made_while_it_sampled() {
    let reference = ReferenceResults::for_sampling(LONG);
    let elsewhere = tempfile::tempdir().unwrap();
    let out = elsewhere.path().join("backup").display().to_string();
    let (run, backed_up_s);
    {
        let fleet = Fleet::start(AGENTS);
        run = fleet.submit(&reference.write_spec(&fleet, fleet.path()));
        fleet.await_samples(&run, 64, LIMIT);
        backed_up_s = unix_time_s();
        fleet.run(&["backup", "--out", &out]).assert_success();
        // These are lost.
        fleet.await_samples(&run, 64, LIMIT);
        copy_store(&fleet.path().join("store"), &elsewhere.path().join("store"));
    }
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().display().to_string();
    run_flotilla(&["restore", "--dir", &at, "--from", &out], []).assert_success();
    let store = format!("file://{}/store", elsewhere.path().display());
    let fleet = Fleet::start_in(directory, AGENTS, &["--store", &store], []);
    let restored_s = unix_time_s();
    reference.assert_same_results(&fleet, &run, LIMIT);
    let samples = |from_s: f64, to_s: f64| {
        let is_within = |fact: &&Value| {
            let at_s = fact["time_ms"].as_f64().expect("a time") / 1000.0;
            fact["subject"].as_str().expect("a subject").contains(".samples.1.")
                && (from_s..to_s).contains(&at_s)
        };
        fleet.read_facts(&run).iter().filter(is_within).count()
    };
    assert!(samples(0.0, backed_up_s) > 0, "the backup has samples of the cycle");
    assert!(samples(backed_up_s, f64::MAX) > 0, "and not all of them");
    println!("{} facts of samples since the restore", samples(restored_s, f64::MAX));
}

#[test]
fn a_store_that_was_moved_is_used_and_an_interrupted_run_continues() {
    let reference = ReferenceResults::for_sampling(LONG);
    let mut fleet = Fleet::start(AGENTS);
    let run = fleet.submit(&reference.write_spec(&fleet, fleet.path()));
    fleet.await_samples(&run, 64, LIMIT);
    fleet.run(&["run", "pause", &run]).assert_success();
    fleet.run(&["down"]).assert_success();
    wait_until("the fleet is down", LIMIT, || fleet.exit_status());
    let elsewhere = tempfile::tempdir().unwrap();
    let (old, new) = (fleet.path().join("store"), elsewhere.path().join("store"));
    copy_store(&old, &new);
    std::fs::remove_dir_all(&old).unwrap();
    fleet.restart_with(&["--store", &format!("file://{}", new.display())]);
    fleet.await_agents();
    fleet.run(&["run", "resume", &run]).assert_success();
    reference.assert_same_results(&fleet, &run, LIMIT);
    assert!(!old.exists(), "nothing was written to the old place");
}

#[test]
fn a_damaged_backup_is_refused_before_anything_is_created() {
    let elsewhere = tempfile::tempdir().unwrap();
    let backup = elsewhere.path().join("backup");
    let out = backup.display().to_string();
    let fleet = Fleet::start("verifier");
    fleet.run(&["backup", "--out", &out]).assert_success();
    drop(fleet);
    let log = backup.join("FLOTILLA.snapshot");
    let mut bytes = std::fs::read(&log).unwrap();
    bytes[7] ^= 1;
    std::fs::write(&log, bytes).unwrap();
    let at = elsewhere.path().join("new").display().to_string();
    let restore = ["restore", "--dir", &at, "--from", &out];
    run_flotilla(&restore, []).assert_refused(&["FLOTILLA.snapshot is damaged"]);
    assert!(!Path::new(&at).exists(), "nothing was begun");
    std::fs::remove_file(backup.join("backup.json")).unwrap();
    run_flotilla(&restore, []).assert_refused(&["not a backup, or an unfinished one"]);
}
