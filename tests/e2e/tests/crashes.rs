//! Processes killed in the middle of their work: nothing acknowledged is lost, nothing
//! is counted twice.

use std::time::Duration;

use e2e::{Files, Fleet, Sampling, until};

const LIMIT: Duration = Duration::from_secs(180);

/// Enough work that a kill meets it half done.
const LONG: Sampling = Sampling { prompts: 192, per_prompt: 8, max_new_tokens: 480, cycles: 1 };

fn fleet_with_base() -> (Fleet, Files, String) {
    let fleet = Fleet::up("trainer,generator=2,verifier,evaluator");
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(5, 0));
    fleet.finish(&base, LIMIT);
    (fleet, files, base)
}

/// Waits until some, but not all, of a run's samples are in.
fn await_some_samples(fleet: &Fleet, run: &str) {
    until("samples come in", LIMIT, || {
        let audit = fleet.json(&["audit", run]).ok()?;
        let counts = ["accepted_samples", "planned_samples"].map(|key| audit[key].as_u64());
        let [Some(accepted), Some(planned)] = counts else { return None };
        // Cycle 0 only measures: a few samples, quickly made.
        let begun = planned > 192 * 8;
        assert!(!begun || accepted < planned, "too fast to be disturbed");
        (begun && accepted > 32).then_some(())
    });
}

#[test]
fn a_generator_killed_in_mid_job_costs_nothing_but_time() {
    let (fleet, files, base) = fleet_with_base();
    let run = fleet.submit(&files.raft(&base, LONG));
    await_some_samples(&fleet, &run);
    fleet.kill("generator-1");
    let ended = fleet.finish(&run, LIMIT);
    assert_eq!(ended["cyclesDone"][1]["sampled"], 192 * 8);
    fleet.audit_clean(&run);
}

#[test]
fn what_a_killed_agent_held_is_begun_again_by_its_successor_however_long_the_lease() {
    let fleet = Fleet::up_with("trainer,generator,verifier,evaluator", &["--lease", "300"], []);
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(5, 0));
    fleet.finish(&base, LIMIT);
    let run = fleet.submit(&files.raft(&base, LONG));
    await_some_samples(&fleet, &run);
    fleet.kill("generator-1");
    fleet.finish(&run, LIMIT);
    fleet.audit_clean(&run);
}

#[test]
fn a_coordinator_killed_in_mid_cycle_costs_nothing_but_time() {
    let (fleet, files, base) = fleet_with_base();
    let run = fleet.submit(&files.raft(&base, LONG));
    await_some_samples(&fleet, &run);
    fleet.kill("coordinator");
    let ended = fleet.finish(&run, LIMIT);
    assert_eq!(ended["cyclesDone"][1]["sampled"], 192 * 8);
    fleet.audit_clean(&run);
}
