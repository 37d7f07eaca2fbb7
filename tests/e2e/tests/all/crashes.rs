//! Processes that are killed during their work. No acknowledged fact is lost and nothing counts
//! twice.

use std::time::Duration;

use e2e::{Fleet, Sampling, SpecFiles, wait_until};

const LIMIT: Duration = Duration::from_secs(180);

/// Long enough that a kill interrupts it.
const LONG: Sampling = Sampling { prompts: 192, per_prompt: 8, max_new_tokens: 480, cycles: 1 };

fn fleet_with_base() -> (Fleet, SpecFiles, String) {
    let fleet = Fleet::start("trainer,generator=2,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(5, 0));
    fleet.await_success(&base, LIMIT);
    (fleet, files, base)
}

/// Waits until some, but not all, of a run's samples are accepted.
fn await_some_samples(fleet: &Fleet, run: &str) {
    wait_until("samples come in", LIMIT, || {
        let audit = fleet.run_json(&["audit", run]).ok()?;
        let counts = ["accepted_samples", "planned_samples"].map(|key| audit[key].as_u64());
        let [Some(accepted), Some(planned)] = counts else { return None };
        // Cycle 0 only measures, and has few samples.
        let begun = planned > 192 * 8;
        assert!(!begun || accepted < planned, "too fast to be disturbed");
        (begun && accepted > 32).then_some(())
    });
}

#[test]
fn a_generator_killed_in_mid_job_costs_nothing_but_time() {
    let (fleet, files, base) = fleet_with_base();
    let run = fleet.submit(&files.write_raft_spec(&base, LONG));
    await_some_samples(&fleet, &run);
    fleet.kill("generator-1");
    let ended = fleet.await_success(&run, LIMIT);
    assert_eq!(ended["cyclesDone"][1]["sampled"], 192 * 8);
    fleet.assert_clean_audit(&run);
}

#[test]
fn the_jobs_of_a_killed_agent_are_restarted_before_a_long_lease_expires() {
    let fleet = Fleet::start_with("trainer,generator,verifier,evaluator", &["--lease", "300"], []);
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(5, 0));
    fleet.await_success(&base, LIMIT);
    let run = fleet.submit(&files.write_raft_spec(&base, LONG));
    await_some_samples(&fleet, &run);
    fleet.kill("generator-1");
    fleet.await_success(&run, LIMIT);
    fleet.assert_clean_audit(&run);
}

#[test]
fn a_coordinator_killed_in_mid_cycle_costs_nothing_but_time() {
    let (fleet, files, base) = fleet_with_base();
    let run = fleet.submit(&files.write_raft_spec(&base, LONG));
    await_some_samples(&fleet, &run);
    fleet.kill("coordinator");
    let ended = fleet.await_success(&run, LIMIT);
    assert_eq!(ended["cyclesDone"][1]["sampled"], 192 * 8);
    fleet.assert_clean_audit(&run);
}
