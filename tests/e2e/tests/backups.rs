//! A fleet that is copied while it works, and goes on elsewhere.

use std::{path::Path, time::Duration};

use e2e::{Files, Fleet, Sampling, flotilla};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);
const SAMPLING: Sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 48, cycles: 2 };

fn listed(fleet: &Fleet, run: &str) -> (Value, Value) {
    let shown = fleet.json(&["run", "show", run]).expect("a run");
    let audit = fleet.json(&["audit", run, "--no-store"]).expect("an audit");
    (shown, audit)
}

/// The store is the user's own to copy.
fn copy_store(from: &Path, to: &Path) {
    let status = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(status.expect("cp is there").success());
}

#[test]
fn a_fleet_goes_on_from_its_backup() {
    let elsewhere = tempfile::tempdir().unwrap();
    let backup = elsewhere.path().join("backup");
    let out = backup.display().to_string();
    let (base, before);
    {
        let fleet = Fleet::up("trainer,generator,verifier,evaluator");
        let files = Files::create(fleet.path());
        base = fleet.submit(&files.sft(5, 0));
        fleet.finish(&base, LIMIT);
        fleet.run(&["backup", "--out", &out]).succeeds();
        fleet.run(&["backup", "--out", &out]).refuses(&["is not empty"]);
        before = listed(&fleet, &base);
        copy_store(&fleet.path().join("store"), &elsewhere.path().join("store"));
    }
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().display().to_string();
    let restore = ["restore", "--dir", &at, "--from", &out];
    flotilla(&restore, []).succeeds();
    flotilla(&restore, []).refuses(&["is not empty"]);
    let store = format!("file://{}/store", elsewhere.path().display());
    let arguments = ["--store", &store];
    let fleet = Fleet::up_in(directory, "trainer,generator,verifier,evaluator", &arguments, []);
    assert_eq!(listed(&fleet, &base), before, "the same log, to the position");
    let files = Files::create(fleet.path());
    let raft = fleet.submit(&files.raft(&base, SAMPLING));
    fleet.finish(&raft, LIMIT);
    fleet.audit_clean(&raft);
    fleet.audit_clean(&base);
}

#[test]
fn a_damaged_backup_is_refused_before_anything_is_made() {
    let elsewhere = tempfile::tempdir().unwrap();
    let backup = elsewhere.path().join("backup");
    let out = backup.display().to_string();
    let fleet = Fleet::up("verifier");
    fleet.run(&["backup", "--out", &out]).succeeds();
    drop(fleet);
    let log = backup.join("FLOTILLA.snapshot");
    let mut bytes = std::fs::read(&log).unwrap();
    bytes[7] ^= 1;
    std::fs::write(&log, bytes).unwrap();
    let at = elsewhere.path().join("new").display().to_string();
    let restore = ["restore", "--dir", &at, "--from", &out];
    flotilla(&restore, []).refuses(&["FLOTILLA.snapshot is damaged"]);
    assert!(!Path::new(&at).exists(), "nothing was begun");
    std::fs::remove_file(backup.join("backup.json")).unwrap();
    flotilla(&restore, []).refuses(&["not a backup, or an unfinished one"]);
}
