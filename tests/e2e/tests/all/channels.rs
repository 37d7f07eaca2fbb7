//! A channel that runs move while coordinators are killed.

use std::{fmt::Write, time::Duration};

use e2e::{Fleet, Member, Sampling, SpecFiles, wait_until};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(120);

/// A completion passes if it is a digit, which only the longer training of the base teaches.
const SAMPLING: Sampling = Sampling { prompts: 64, per_prompt: 2, max_new_tokens: 1, cycles: 1 };
const HELDOUT: u32 = 64;

/// The times between a run's end and the kill. Coordinators look at ended runs every two seconds.
const KILLED_AFTER_MS: [u64; 3] = [0, 1_000, 2_000];

/// A fleet with two coordinators, whose channel names a model that a run of `spec` improves.
struct PromotingFleet {
    fleet: Fleet,
    /// The second coordinator.
    _second: Member,
    spec: std::path::PathBuf,
    /// The model that the channel names first.
    before: String,
}

impl PromotingFleet {
    fn start() -> Self {
        let fleet = Fleet::start_open("trainer,generator=2,verifier,evaluator");
        let (nats, logs) = (fleet.nats_url(), fleet.path().join("logs"));
        let arguments =
            ["coordinator", "--nats", &nats, "--gateway", "127.0.0.1:0", "--lease", "3"];
        let second = Member::start("coordinator-2", &[], &arguments, [], &logs);
        let files = SpecFiles::create(fleet.path());
        let [weak, good] = [5, 120].map(|steps| {
            let base = fleet.submit(&files.write_sft_spec(steps, 0));
            fleet.await_success(&base, LIMIT);
            base
        });
        let mut heldout = String::new();
        for n in 0..HELDOUT {
            let _ = writeln!(heldout, "{}", json!({ "prompt": format!("{n}09+1=") }));
        }
        let write_spec = |base: &str| {
            let spec = files.write_raft_spec(base, SAMPLING);
            std::fs::write(files.path("heldout.jsonl"), &heldout).expect("a file");
            spec
        };
        let run = fleet.submit(&write_spec(&weak));
        fleet.await_success(&run, LIMIT);
        let spec = write_spec(&good);
        let text = std::fs::read_to_string(&spec).expect("a spec");
        let text = text.replace("name: raft\n", "name: better\npromote: { channel: stable }\n");
        std::fs::write(&spec, text).expect("a file");
        Self { fleet, _second: second, spec, before: format!("{run}/0") }
    }

    fn name_first_model(&self) {
        let arguments = ["channel", "move", "stable", "--checkpoint", &self.before];
        self.fleet.run(&arguments).assert_success();
    }

    /// Returns the channel's moves by the promotion of a run.
    fn promotions_of(&self, run: &str) -> Option<Vec<Value>> {
        let moves = self.fleet.run_json(&["channel", "history", "stable"]).ok()?;
        let moves = moves.as_array()?.iter().filter(|it| it["move"]["promotion"] == run);
        Some(moves.cloned().collect())
    }
}

#[test]
fn each_run_moves_its_channel_once_though_coordinators_are_killed() {
    let promoting = PromotingFleet::start();
    let fleet = &promoting.fleet;
    let mut runs = Vec::new();
    for after_ms in KILLED_AFTER_MS {
        promoting.name_first_model();
        let run = fleet.submit(&promoting.spec);
        fleet.await_success(&run, LIMIT);
        std::thread::sleep(Duration::from_millis(after_ms));
        fleet.kill("coordinator");
        wait_until("the channel moves to the run", LIMIT, || {
            let found = promoting.promotions_of(&run)?;
            (!found.is_empty()).then_some(())
        });
        runs.push(run);
    }
    // The restarted coordinator looks once more at all runs.
    promoting.name_first_model();
    std::thread::sleep(Duration::from_secs(3));
    for run in &runs {
        let found = promoting.promotions_of(run).expect("a history");
        assert_eq!(found.len(), 1, "{run} moved the channel so: {found:#?}");
        fleet.assert_clean_audit(run);
    }
    let audit = fleet.assert_clean_audit("stable");
    assert_eq!(audit["facts"], 2 * KILLED_AFTER_MS.len() + 1);
}
