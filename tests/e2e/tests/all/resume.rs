//! Killed trainings resume from their last checkpoint and have the same results.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use e2e::{Fleet, Process, SpecFiles, wait_until};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(180);

/// Long enough that a kill interrupts it.
const STEPS: u32 = 6000;
const SAVE_EVERY: u32 = 500;

/// Returns the results that must not depend on interruptions.
fn training_results(ended: &Value) -> Vec<Value> {
    let checkpoints = ended["checkpoints"].as_array().expect("a list");
    let facts = checkpoints.iter().map(|listed| &listed["checkpoint"]);
    let summarize = |fact: &Value| {
        json!({
            "step": fact["step"], "loss": fact["loss"], "rate": fact["learningRate"],
            "tokens": fact["tokens"], "tree": fact["tree"]["manifest"],
            "resume": fact["resume"]["manifest"],
        })
    };
    facts.map(summarize).collect()
}

fn resume_directory(fleet: &Fleet, run: &str) -> PathBuf {
    fleet.path().join("store/runs").join(run).join("resume")
}

/// Returns the number of complete resume states of a run in the store.
fn count_states(fleet: &Fleet, run: &str) -> usize {
    let trees = std::fs::read_dir(resume_directory(fleet, run)).into_iter().flatten().flatten();
    trees.filter(|tree| tree.path().join("manifest.json").exists()).count()
}

/// Waits for a checkpoint of at least this step that is not the last one.
fn await_step(fleet: &Fleet, run: &str, step: u64) -> u64 {
    wait_until(&format!("a checkpoint at step {step}"), LIMIT, || {
        assert!(count_states(fleet, run) <= 2, "one, and the one that it replaces");
        let listed = fleet.run_json(&["checkpoint", "list", run]).ok()?;
        let newest = listed.as_array()?.last()?["checkpoint"]["step"].as_u64()?;
        assert!(newest < u64::from(STEPS), "too fast to be disturbed");
        (newest >= step).then_some(newest)
    })
}

fn kill_worker(fleet: &Fleet) {
    let is_worker =
        |process: &Process| process.arguments.get(1..3) == Some(&["worker".into(), "train".into()]);
    let worker = wait_until("the trainer's worker runs", LIMIT, || {
        fleet.processes().into_iter().find(is_worker)?.pid()
    });
    kill_process(worker, Signal::KILL).expect("our own process can be killed");
}

/// Returns the steps after which trainings of a run began, in order.
fn start_steps(fleet: &Fleet, run: &str) -> Vec<u64> {
    let log = std::fs::read_to_string(log_path(fleet)).expect("the trainer's log");
    let of_run = log.lines().filter(|line| line.contains(&format!("run={run} ")));
    let begins = of_run.filter(|line| line.contains("training begins after a step"));
    begins.filter_map(|line| line.rsplit_once("step=")?.1.trim().parse().ok()).collect()
}

fn log_path(fleet: &Fleet) -> PathBuf {
    fleet.path().join("agents/trainer-1/agent.log")
}

fn await_no_states(fleet: &Fleet, run: &str) {
    wait_until("no state remains", LIMIT, || {
        let count = std::fs::read_dir(resume_directory(fleet, run)).into_iter().flatten().count();
        (count == 0).then_some(())
    });
}

#[test]
fn a_training_resumes_bit_for_bit_after_its_worker_and_its_agent_were_killed() {
    let fleet = Fleet::start("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let undisturbed = fleet.submit(&files.write_sft_spec(STEPS, SAVE_EVERY));
    let expected = training_results(&fleet.await_success(&undisturbed, LIMIT));
    assert_eq!(expected.len(), (STEPS / SAVE_EVERY) as usize);
    let has_state = |fact: &Value| fact["resume"].is_string();
    let with_state = expected.iter().filter(|fact| has_state(fact)).count();
    assert_eq!(with_state, expected.len() - 1, "all but the last can be gone on from");
    assert_eq!(start_steps(&fleet, &undisturbed), [0]);
    await_no_states(&fleet, &undisturbed);

    let run = fleet.submit(&files.write_sft_spec(STEPS, SAVE_EVERY));
    let first = await_step(&fleet, &run, u64::from(SAVE_EVERY));
    kill_worker(&fleet);
    let second = await_step(&fleet, &run, first + 2 * u64::from(SAVE_EVERY));
    fleet.kill("trainer-1");
    let ended = fleet.await_success(&run, LIMIT);

    let start_steps = start_steps(&fleet, &run);
    assert_eq!((start_steps.len(), start_steps[0]), (3, 0), "{start_steps:?}");
    assert!(start_steps[1] >= first && start_steps[2] >= second, "{start_steps:?}");
    assert_eq!(training_results(&ended), expected);
    assert_eq!(ended["failures"].as_array().map(Vec::len), Some(1), "{:#}", ended["failures"]);
    await_no_states(&fleet, &run);
    fleet.assert_clean_audit(&run);
}

#[test]
fn a_training_whose_state_is_damaged_starts_over_and_ends_the_same() {
    let fleet = Fleet::start("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let spec = files.write_sft_spec(STEPS, STEPS / 2);
    let undisturbed = fleet.submit(&spec);
    let expected = training_results(&fleet.await_success(&undisturbed, LIMIT));

    let run = fleet.submit(&spec);
    await_step(&fleet, &run, u64::from(STEPS / 2));
    damage_moments(&resume_directory(&fleet, &run));
    kill_worker(&fleet);
    assert_eq!(training_results(&fleet.await_success(&run, LIMIT)), expected);
    assert_eq!(start_steps(&fleet, &run), [0, 0]);
    let log = std::fs::read_to_string(log_path(&fleet)).expect("the trainer's log");
    let warned =
        log.lines().any(|line| line.contains("cannot resume from") && line.contains("is damaged"));
    assert!(warned, "{log}");
    await_no_states(&fleet, &run);
    fleet.assert_clean_audit(&run);
}

/// Damages the stored optimizer moments, which are only read on resume.
fn damage_moments(resume: &Path) {
    let tree = std::fs::read_dir(resume).expect("a state").flatten().next().expect("a state");
    let moments = tree.path().join("moments.safetensors");
    let size = std::fs::metadata(&moments).expect("moments").len();
    std::fs::write(&moments, vec![0; size as usize]).expect("a file");
}
