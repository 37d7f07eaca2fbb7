//! `flotilla checkpoint prune`: what it removes, what it keeps, and what readers are told.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{fs, path::Path, time::Duration};

use e2e::{Fleet, Sampling, SpecFiles, wait_until};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(180);

const SAMPLING: Sampling = Sampling { prompts: 8, per_prompt: 4, max_new_tokens: 16, cycles: 3 };

const RECORD: &str = "REMOVED.json";

/// A closed fleet with a trained model, `base-1`, and two RAFT runs of it, all ended and archived.
struct EndedRuns {
    fleet: Fleet,
    files: SpecFiles,
}

impl EndedRuns {
    fn create() -> Self {
        let agents = "trainer,generator,verifier,evaluator";
        let fleet = Fleet::start_with(agents, &["--keep-cycles", "0"], []);
        let files = SpecFiles::create(fleet.path());
        fleet.await_success(&fleet.submit(&files.write_sft_spec(20, 10)), LIMIT);
        let spec = files.write_raft_spec("base-1/0/20", SAMPLING);
        let runs = [fleet.submit(&spec), fleet.submit(&spec)];
        runs.iter().for_each(|run| drop(fleet.await_success(run, LIMIT)));
        let this = Self { fleet, files };
        let archives = 2 * (SAMPLING.cycles as usize + 1);
        wait_until("all cycles are archived", LIMIT, || {
            let plan = this.prune(&[]);
            let samples = plan["trees"].as_array()?.iter().filter(|it| it["what"] == "samples");
            (samples.count() == archives).then_some(())
        });
        this
    }

    fn prune(&self, more: &[&str]) -> Value {
        self.fleet.run_json(&[&["checkpoint", "prune", "--keep", "best"], more].concat()).unwrap()
    }

    /// Counts the bytes of the store's runs, without records of removals.
    fn run_bytes(&self) -> u64 {
        fn below(directory: &Path) -> u64 {
            let entries = fs::read_dir(directory).unwrap().map(|it| it.unwrap());
            let bytes = entries.map(|entry| match entry.metadata().unwrap() {
                it if it.is_dir() => below(&entry.path()),
                it if entry.file_name() != RECORD => it.len(),
                _ => 0,
            });
            bytes.sum()
        }
        below(&self.fleet.path().join("store/runs"))
    }

    /// Returns the directory of a checkpoint in the store.
    fn directory(&self, run: &str, cycle: u64, step: u64) -> std::path::PathBuf {
        let parent = self.fleet.path().join(format!("store/runs/{run}/checkpoints"));
        let name = format!("c{cycle}-s{step}-");
        let mut found = fs::read_dir(parent).unwrap().map(|it| it.unwrap().path());
        found.find(|it| it.file_name().unwrap().to_string_lossy().starts_with(&name)).unwrap()
    }

    fn export(&self, checkpoint: &str) -> e2e::Output {
        let out = tempfile::tempdir().unwrap();
        let out = out.path().join("exported").display().to_string();
        self.fleet.run(&["checkpoint", "export", checkpoint, "--out", &out])
    }
}

fn removed_checkpoints(plan: &Value) -> Vec<(String, u64, u64)> {
    let trees = plan["trees"].as_array().unwrap().iter();
    let removed = trees.filter(|it| it["is_kept"] == false && it["what"] == "checkpoint");
    let number = |value: &Value| value.as_u64().unwrap();
    removed
        .map(|it| {
            (it["run"].as_str().unwrap().to_owned(), number(&it["cycle"]), number(&it["step"]))
        })
        .collect()
}

fn reason(plan: &Value, run: &str, cycle: u64) -> String {
    let mut trees = plan["trees"].as_array().unwrap().iter();
    let is_it =
        |it: &&Value| it["run"] == run && it["cycle"] == cycle && it["what"] == "checkpoint";
    trees.rfind(is_it).unwrap()["reason"].as_str().unwrap().to_owned()
}

#[test]
fn what_no_rule_keeps_is_removed_and_everything_else_still_works() {
    let ended = EndedRuns::create();
    let fleet = &ended.fleet;
    for cycle in [1, 2] {
        let model = format!("raft-1/{cycle}");
        fleet.run(&["channel", "move", "stable", "--checkpoint", &model]).assert_success();
    }
    let before = ended.run_bytes();
    let plan = ended.prune(&["--dry-run"]);
    let removed = removed_checkpoints(&plan);
    assert_eq!(reason(&plan, "raft-1", 2), "channel stable names it");
    assert_eq!(reason(&plan, "raft-1", 1), "channel stable rolls back to it");
    assert_eq!(reason(&plan, "base-1", 0), "channel stable names it");
    assert!(removed.iter().any(|(run, ..)| run == "raft-2"), "{plan:#}");
    assert!(removed.iter().all(|(run, ..)| run != "raft-1"), "{plan:#}");
    assert_eq!(before, ended.run_bytes(), "a plan removes nothing");

    let operator = fleet.path().join("operator").display().to_string();
    let create = ["user", "create", "bob", "--scope", "operator", "--out", &operator];
    fleet.run(&create).assert_success();
    fleet.run(&["--dir", &operator, "checkpoint", "prune"]).assert_refused(&["K104", "bob"]);

    // As after a crash in the middle of a removal.
    let (run, cycle, step) = removed.iter().find(|(run, ..)| run == "raft-2").unwrap();
    let half = ended.directory(run, *cycle, *step);
    let manifest = fs::metadata(half.join("manifest.json")).unwrap().len();
    fs::write(half.join(RECORD), r#"{"at":"then","by":"ann","rules":"best"}"#).unwrap();
    fs::remove_file(half.join("manifest.json")).unwrap();

    let done = ended.prune(&["--yes"]);
    assert_eq!(removed_checkpoints(&done), removed);
    let freed = done["bytes"].as_u64().unwrap();
    println!("{freed} of {before} bytes removed, {} trees", removed.len());
    assert_eq!(freed + manifest, plan["bytes"].as_u64().unwrap());
    assert_eq!(ended.run_bytes() + freed + manifest, before);
    assert_eq!(removed_checkpoints(&ended.prune(&["--yes"])), []);

    for run in ["base-1", "raft-1"] {
        fleet.assert_clean_deep_audit(run);
    }
    // Its command fails if there are findings, or if something is not checked for another reason.
    let audit = fleet.run_json(&["audit", "raft-2", "--deep"]).unwrap();
    assert!(audit["accepted_samples"].as_u64() < audit["planned_samples"].as_u64(), "{audit:#}");
    assert!(audit["notes"].to_string().contains("removed by retention"), "{audit:#}");
    assert_eq!(audit["not_checked"], serde_json::json!([]), "{audit:#}");
    for kept in ["raft-1/1", "raft-1/2", "raft-2", "raft-2/newest", "base-1"] {
        ended.export(kept).assert_success();
    }
    fleet.run(&["channel", "roll-back", "stable"]).assert_success();
    let gone = format!("{run}/{cycle}/{step}");
    let explanation = ["S113", "by ann", "best"];
    ended.export(&gone).assert_refused(&explanation);
    fleet.run(&["checkpoint", "get", &gone]).assert_refused(&explanation);
    let channel = ["channel", "move", "beta", "--checkpoint", &gone];
    fleet.run(&channel).assert_refused(&explanation);
    let spec = ended.files.write_raft_spec(&gone, SAMPLING).display().to_string();
    fleet.run(&["run", "submit", &spec]).assert_refused(&explanation);
    let listed = fleet.run_json(&["checkpoint", "list", "raft-2"]).unwrap();
    let of_gone = listed
        .as_array()
        .unwrap()
        .iter()
        .find(|it| it["checkpoint"]["cycle"] == *cycle && it["checkpoint"]["step"] == *step);
    assert_eq!(of_gone.unwrap()["removed"], true, "{listed:#}");

    fleet.run(&["channel", "forget", "stable"]).assert_success();
    assert_eq!(fleet.run_json(&["channel", "list"]).unwrap(), serde_json::json!([]));
    for command in ["forget", "roll-back", "move"] {
        fleet.run(&["channel", command, "stable"]).assert_refused(&["R118"]);
    }
    let history = fleet.run_json(&["channel", "history", "stable"]).unwrap();
    assert_eq!(history.as_array().unwrap().len(), 4, "{history:#}");
    let plan = ended.prune(&["--dry-run"]);
    assert!(!plan.to_string().contains("channel stable"), "{plan:#}");
    assert_a_fork_keeps_what_it_took_over(&ended, &plan);
}

/// Forks raft-1 after a cycle whose checkpoint no rule keeps, and ends the fork before it makes one
/// of its own.
fn assert_a_fork_keeps_what_it_took_over(ended: &EndedRuns, plan: &Value) {
    let fleet = &ended.fleet;
    let cycle = [1, 2].into_iter().find(|cycle| reason(plan, "raft-1", *cycle).is_empty()).unwrap();
    let forked = fleet.run(&["run", "fork", &format!("raft-1@{cycle}")]);
    forked.assert_success();
    let fork = forked.stdout.trim();
    fleet.run(&["run", "cancel", fork]).assert_success();
    fleet.await_state(fork, "CANCELLED", LIMIT);
    let done = ended.prune(&["--yes", "raft-1"]);
    let expected = format!("{fork} uses it: newest of its run");
    assert_eq!(reason(&done, "raft-1", cycle), expected, "{done:#}");
    ended.export(&format!("{fork}/newest")).assert_success();
}

#[test]
fn a_run_that_meets_a_removal_of_its_base_is_cancelled_and_the_base_stays() {
    let fleet = Fleet::start("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    fleet.await_success(&fleet.submit(&files.write_sft_spec(20, 10)), LIMIT);
    let ended = EndedRuns { fleet, files };
    // As if a removal was recorded while the run's files were prepared.
    let record = ended.directory("base-1", 0, 20).join(RECORD);
    fs::write(&record, r#"{"at":"now","by":"ann","rules":"best"}"#).unwrap();
    let spec = ended.files.write_raft_spec("base-1/0/20", SAMPLING).display().to_string();
    ended.fleet.run(&["run", "submit", &spec]).assert_refused(&["S113", "by ann"]);
    ended.fleet.await_state("raft-1", "CANCELLED", LIMIT);
    let plan = ended.prune(&["--yes", "base-1"]);
    assert_eq!(reason(&plan, "base-1", 0), "newest of its run");
    assert!(!record.exists(), "the record of a removal that did not happen is taken back");
    ended.export("base-1/0/20").assert_success();
}
