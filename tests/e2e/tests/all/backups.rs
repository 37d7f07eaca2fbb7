//! Backup of a running fleet, and restore in another directory.

use std::{path::Path, time::Duration};

use e2e::{Fleet, Sampling, SpecFiles, run_flotilla};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);
const SAMPLING: Sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 48, cycles: 2 };

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
