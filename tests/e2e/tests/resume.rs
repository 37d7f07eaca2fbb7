//! Trainings that are killed go on from their last checkpoint, as if nothing had been.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use e2e::{Files, Fleet, Process, until};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(180);

/// Enough that a kill meets it half done.
const STEPS: u32 = 6000;
const SAVE_EVERY: u32 = 500;

/// What must not depend on how often a training was interrupted.
fn course(ended: &Value) -> Vec<Value> {
    let checkpoints = ended["checkpoints"].as_array().expect("a list");
    let facts = checkpoints.iter().map(|listed| &listed["checkpoint"]);
    let told = |fact: &Value| {
        json!({
            "step": fact["step"], "loss": fact["loss"], "rate": fact["learningRate"],
            "tokens": fact["tokens"], "tree": fact["tree"]["manifest"],
            "resume": fact["resume"]["manifest"],
        })
    };
    facts.map(told).collect()
}

fn resume_directory(fleet: &Fleet, run: &str) -> PathBuf {
    fleet.path().join("store/runs").join(run).join("resume")
}

/// Complete states of a run in the store.
fn states(fleet: &Fleet, run: &str) -> usize {
    let trees = std::fs::read_dir(resume_directory(fleet, run)).into_iter().flatten().flatten();
    trees.filter(|tree| tree.path().join("manifest.json").exists()).count()
}

/// Waits until a run has a checkpoint of that step or a later one, but not its last.
fn await_step(fleet: &Fleet, run: &str, step: u64) -> u64 {
    until(&format!("a checkpoint at step {step}"), LIMIT, || {
        assert!(states(fleet, run) <= 2, "one, and the one that it replaces");
        let listed = fleet.json(&["checkpoint", "list", run]).ok()?;
        let newest = listed.as_array()?.last()?["checkpoint"]["step"].as_u64()?;
        assert!(newest < u64::from(STEPS), "too fast to be disturbed");
        (newest >= step).then_some(newest)
    })
}

fn kill_worker(fleet: &Fleet) {
    let is_worker =
        |process: &Process| process.arguments.get(1..3) == Some(&["worker".into(), "train".into()]);
    let worker = until("the trainer's worker runs", LIMIT, || {
        fleet.processes().into_iter().find(is_worker)?.pid()
    });
    kill_process(worker, Signal::KILL).expect("our own process can be killed");
}

/// The steps behind which a run's trainings began, in order.
fn beginnings(fleet: &Fleet, run: &str) -> Vec<u64> {
    let log = std::fs::read_to_string(log(fleet)).expect("the trainer's log");
    let of_run = log.lines().filter(|line| line.contains(&format!("run={run} ")));
    let begins = of_run.filter(|line| line.contains("training begins after a step"));
    begins.filter_map(|line| line.rsplit_once("step=")?.1.trim().parse().ok()).collect()
}

fn log(fleet: &Fleet) -> PathBuf {
    fleet.path().join("agents/trainer-1/agent.log")
}

fn none_is_left(fleet: &Fleet, run: &str) {
    until("no state is left", LIMIT, || {
        let left = std::fs::read_dir(resume_directory(fleet, run)).into_iter().flatten().count();
        (left == 0).then_some(())
    });
}

#[test]
fn a_training_killed_with_its_worker_and_with_its_agent_goes_on_to_the_last_bit() {
    let fleet = Fleet::up("trainer,evaluator");
    let files = Files::create(fleet.path());
    let undisturbed = fleet.submit(&files.sft(STEPS, SAVE_EVERY));
    let expected = course(&fleet.finish(&undisturbed, LIMIT));
    assert_eq!(expected.len(), (STEPS / SAVE_EVERY) as usize);
    let has_state = |fact: &Value| fact["resume"].is_string();
    let with_state = expected.iter().filter(|fact| has_state(fact)).count();
    assert_eq!(with_state, expected.len() - 1, "all but the last can be gone on from");
    assert_eq!(beginnings(&fleet, &undisturbed), [0]);
    none_is_left(&fleet, &undisturbed);

    let run = fleet.submit(&files.sft(STEPS, SAVE_EVERY));
    let first = await_step(&fleet, &run, u64::from(SAVE_EVERY));
    kill_worker(&fleet);
    let second = await_step(&fleet, &run, first + 2 * u64::from(SAVE_EVERY));
    fleet.kill("trainer-1");
    let ended = fleet.finish(&run, LIMIT);

    let beginnings = beginnings(&fleet, &run);
    assert_eq!((beginnings.len(), beginnings[0]), (3, 0), "{beginnings:?}");
    assert!(beginnings[1] >= first && beginnings[2] >= second, "{beginnings:?}");
    assert_eq!(course(&ended), expected);
    assert_eq!(ended["failures"].as_array().map(Vec::len), Some(1), "{:#}", ended["failures"]);
    none_is_left(&fleet, &run);
    fleet.audit_clean(&run);
}

#[test]
fn a_training_whose_state_is_damaged_starts_over_and_ends_the_same() {
    let fleet = Fleet::up("trainer,evaluator");
    let files = Files::create(fleet.path());
    let spec = files.sft(STEPS, STEPS / 2);
    let undisturbed = fleet.submit(&spec);
    let expected = course(&fleet.finish(&undisturbed, LIMIT));

    let run = fleet.submit(&spec);
    await_step(&fleet, &run, u64::from(STEPS / 2));
    damage(&resume_directory(&fleet, &run));
    kill_worker(&fleet);
    assert_eq!(course(&fleet.finish(&run, LIMIT)), expected);
    assert_eq!(beginnings(&fleet, &run), [0, 0]);
    let log = std::fs::read_to_string(log(&fleet)).expect("the trainer's log");
    let warned =
        log.lines().any(|line| line.contains("cannot resume from") && line.contains("is damaged"));
    assert!(warned, "{log}");
    none_is_left(&fleet, &run);
    fleet.audit_clean(&run);
}

/// Changes the moments in the store, where nobody looks before they are needed.
fn damage(resume: &Path) {
    let tree = std::fs::read_dir(resume).expect("a state").flatten().next().expect("a state");
    let moments = tree.path().join("moments.safetensors");
    let size = std::fs::metadata(&moments).expect("moments").len();
    std::fs::write(&moments, vec![0; size as usize]).expect("a file");
}
