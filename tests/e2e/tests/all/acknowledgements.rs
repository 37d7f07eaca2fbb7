//! An agent acknowledges a job only when its result is in the log. The agent is killed in between:
//! another one receives the job.

use std::time::Duration;

use e2e::{BusProxy, Fleet, Member, Sampling, SpecFiles, Withheld, wait_until};

use crate::raw_log::RawLog;

const LIMIT: Duration = Duration::from_secs(120);

const ROLES: [&str; 4] = ["trainer", "generator", "verifier", "evaluator"];

const SAMPLING: Sampling = Sampling { prompts: 8, per_prompt: 2, max_new_tokens: 16, cycles: 1 };

fn start_agent(fleet: &Fleet, nats: &str, role: &str, name: &str) -> Member {
    let home = fleet.path().join(name).display().to_string();
    let arguments = ["agent", "--nats", nats, "--roles", role, "--name", name];
    Member::start(name, &[], &[&arguments[..], &["--agent-dir", &home]].concat(), [], fleet.path())
}

/// Kills the only agent of a role when it publishes its first result, and checks that the job was
/// not acknowledged. If the result was lost, the next agent receives the same delivery again.
fn check_acknowledgement(role: &str, queue: &str, result: &str, withheld: Withheld) {
    let others: Vec<&str> = ROLES.into_iter().filter(|other| *other != role).collect();
    let fleet = Fleet::start_open(&others.join(","));
    let files = SpecFiles::create(fleet.path());
    let sft = files.write_sft_spec(5, 0);
    let (run, spec) = match role {
        "generator" | "verifier" => {
            let base = fleet.submit(&sft);
            fleet.await_success(&base, LIMIT);
            ("raft-1", files.write_raft_spec(&base, SAMPLING))
        }
        _ => ("base-1", sft),
    };
    let results = format!("flotilla.{run}.{result}.");
    let proxy = BusProxy::start(&fleet.nats_url(), &results, withheld);
    let mut victim = start_agent(&fleet, &proxy.url(), role, "victim");
    assert_eq!(fleet.submit(&spec), run);
    proxy.await_hold(LIMIT);
    let log = RawLog::open(&fleet);
    let is_stored = || !log.subjects(&format!("{results}>")).is_empty();
    if withheld == Withheld::Confirmation {
        wait_until("the result is stored", LIMIT, || is_stored().then_some(()));
    }
    victim.kill();
    assert_eq!(is_stored(), withheld == Withheld::Confirmation);
    // The victim took the first jobs of this queue.
    let acknowledged = log.queue_state(queue).expect("a queue").acknowledged;
    assert_eq!(acknowledged, 0, "a job was acknowledged before its result was in the log");
    let successor = start_agent(&fleet, &fleet.nats_url(), role, "successor");
    if withheld == Withheld::Publication {
        wait_until("the job is delivered again", LIMIT, || {
            let text = std::fs::read_to_string(successor.log()).ok()?;
            let mut jobs = text.lines().filter(|line| line.contains("job begins"));
            jobs.any(|line| !line.contains("delivered=1")).then_some(())
        });
    }
    fleet.await_success(run, LIMIT);
    fleet.assert_clean_audit(run);
}

#[test]
fn a_trainer_that_dies_before_its_checkpoint_is_in_the_log_loses_no_job() {
    check_acknowledgement("trainer", "train-default", "checkpoint", Withheld::Publication);
}

#[test]
fn a_generator_that_dies_before_its_samples_are_in_the_log_loses_no_job() {
    check_acknowledgement("generator", "generate-default", "samples", Withheld::Publication);
}

#[test]
fn a_verifier_that_dies_before_its_verdicts_are_in_the_log_loses_no_job() {
    check_acknowledgement("verifier", "verify", "verdicts", Withheld::Publication);
}

#[test]
fn an_evaluator_that_dies_before_its_eval_is_in_the_log_loses_no_job() {
    check_acknowledgement("evaluator", "eval", "eval", Withheld::Publication);
}

#[test]
fn a_trainer_whose_checkpoint_is_not_confirmed_does_not_acknowledge_its_job() {
    check_acknowledgement("trainer", "train-default", "checkpoint", Withheld::Confirmation);
}

#[test]
fn a_generator_whose_samples_are_not_confirmed_does_not_acknowledge_its_job() {
    check_acknowledgement("generator", "generate-default", "samples", Withheld::Confirmation);
}

#[test]
fn a_verifier_whose_verdicts_are_not_confirmed_does_not_acknowledge_its_job() {
    check_acknowledgement("verifier", "verify", "verdicts", Withheld::Confirmation);
}

#[test]
fn an_evaluator_whose_eval_is_not_confirmed_does_not_acknowledge_its_job() {
    check_acknowledgement("evaluator", "eval", "eval", Withheld::Confirmation);
}
