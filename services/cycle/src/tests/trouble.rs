//! Runs with failing jobs, lost orders and slow agents.

use wire::{
    FactKey, WorkKind,
    v1::{self, Purpose::Train},
};

use super::log::{Log, WAITING, raft};
use crate::{HeldJob, RunPhase, audit_records};

fn attempts(log: &Log, job: &str) -> usize {
    log.generate_orders().filter(|order| order.cycle == 1 && order.job == job).count()
}

fn at_generate() -> Log {
    let mut log = Log::new(raft(1));
    log.until(RunPhase::Generate);
    log
}

fn failed(log: &Log) -> String {
    let done = log.run().done.expect("the run has ended");
    assert_eq!(done.status(), v1::done::Status::Failed);
    done.message
}

#[test]
fn a_job_that_is_given_up_is_set_aside_and_the_cycle_goes_on_without_it() {
    let mut log = at_generate();
    let jobs = log.jobs(1, Train);
    let lost = jobs[1].as_str();
    log.fail("generate", &format!("1-{lost}"), "no memory");
    log.generate_all_but(&[lost]);
    log.until(RunPhase::Train);
    // Too late: the selection stays.
    log.generate();
    log.run_to_the_end();
    let run = log.run();
    let planned = run.cycles[&1].jobs[&lost.parse().unwrap()].planned_samples();
    let selected = run.cycles[&1].selected.as_ref().unwrap();
    assert_eq!(selected.dropped["set aside"], planned);
    let dropped: u32 = selected.dropped.values().sum();
    assert_eq!(selected.considered, selected.kept + dropped);
    let done = run.done.as_ref().unwrap();
    assert_eq!(done.status(), v1::done::Status::Succeeded);
    assert!(done.message.contains(&format!("{planned} samples were set aside")), "{done:?}");
    for _ in 0..2 {
        let audit = audit_records(log.records()).unwrap();
        assert_eq!((audit.findings, audit.counts.set_aside_samples), (vec![], u64::from(planned)));
        log.archive(1);
    }
}

#[test]
fn the_first_of_a_result_and_a_last_failure_counts() {
    let mut log = at_generate();
    let jobs = log.jobs(1, Train);
    log.generate();
    log.fail("generate", &format!("1-{}", jobs[0]), "late");
    log.run_to_the_end();
    let run = log.run();
    assert!(run.cycles[&1].jobs.values().all(|job| job.set_aside.is_none()));
    assert!(!run.cycles[&1].selected.as_ref().unwrap().dropped.contains_key("set aside"));
}

#[test]
fn a_run_whose_every_job_fails_ends_with_the_reason() {
    for count in [3, usize::MAX] {
        let mut log = at_generate();
        for job in log.jobs(1, Train).into_iter().take(count) {
            log.fail("generate", &format!("1-{job}"), "the model does not load");
        }
        log.coordinate();
        assert!(failed(&log).contains("the model does not load"));
    }
}

#[test]
fn a_run_ends_when_every_box_there_has_failed_at_several_jobs() {
    let mut log = at_generate();
    let jobs = log.jobs(1, Train);
    let fail = |log: &mut Log, agent: &str, job: &str, attempt| {
        log.failure(v1::Failure {
            kind: "generate".into(),
            id: format!("1-{job}"),
            agent: agent.into(),
            attempt,
            cause: v1::failure::Cause::Work.into(),
            message: format!("{agent} has no GPU"),
            ..Default::default()
        });
    };
    for job in &jobs[..3] {
        fail(&mut log, "g1", job, 1);
    }
    log.coordinate();
    assert!(log.run().done.is_none(), "the other has not tried");
    for job in &jobs[..3] {
        fail(&mut log, "g2", job, 2);
    }
    log.coordinate();
    assert!(failed(&log).contains("g2 has no GPU"), "{}", failed(&log));
}

#[test]
fn cycles_that_keep_nothing_end_the_run_instead_of_repeating_themselves() {
    let mut log = Log::new(raft(9));
    (1..=9).for_each(|cycle| log.nothing_passes_in_cycle(cycle));
    log.run_to_the_end();
    let why = failed(&log);
    assert!(why.contains("kept no sample") && why.contains("160 failed"), "{why}");
    assert!(why.contains("flotilla run explain"), "{why}");
    assert_eq!(log.run().current_cycle(), 4);
}

#[test]
fn a_verification_that_no_agent_can_do_is_awaited() {
    use v1::failure::Cause::{Surroundings, Work};
    let mut log = at_generate();
    let failure = v1::Failure {
        kind: "verify".into(),
        id: "1-t1".into(),
        agent: "v1".into(),
        message: "this box lacks the executable x; no connected verifier has it (E117)".into(),
        cause: Surroundings.into(),
        ..Default::default()
    };
    let awaited = |log: &Log, failure: &v1::Failure| crate::awaited_verdicts(&log.run(), failure);
    let place = FactKey::Verdicts { cycle: 1, job: "t1".parse().unwrap() };
    assert_eq!(awaited(&log, &failure), Some(place));
    let said = crate::describe_unmet_needs(&failure);
    assert!(
        said.starts_with("waits: v1 cannot verify: this box lacks the executable x;"),
        "{said}"
    );
    for other in [
        v1::Failure { cause: Work.into(), ..failure.clone() },
        v1::Failure { kind: "generate".into(), ..failure.clone() },
        v1::Failure { message: "this box lacks x; left to v2 (E117)".into(), ..failure.clone() },
        v1::Failure { r#final: true, ..failure.clone() },
    ] {
        assert_eq!(awaited(&log, &other), None, "{other:?}");
    }
    log.run_to_the_end();
    assert_eq!(awaited(&log, &failure), None, "its cycle is done");
}

#[test]
fn a_run_that_trained_nothing_says_so() {
    let mut log = Log::new(raft(2));
    (1..=2).for_each(|cycle| log.nothing_passes_in_cycle(cycle));
    log.run_to_the_end();
    let done = log.run().done.unwrap();
    assert_eq!(done.status(), v1::done::Status::Succeeded);
    assert_eq!(done.message, "no cycle kept a sample, so nothing was trained");
    let mut log = Log::new(raft(2));
    log.nothing_passes_in_cycle(1);
    log.run_to_the_end();
    assert_eq!(log.run().done.unwrap().message, "", "the second cycle trained");
}

#[test]
fn an_order_nobody_holds_is_written_again_ever_less_often() {
    let mut log = at_generate();
    let job = log.jobs(1, Train)[0].clone();
    let mut times = Vec::new();
    for second in 0..2000 {
        log.now_ms = 1_000_000 + 1000 * second;
        let before = attempts(&log, &job);
        log.coordinate();
        if attempts(&log, &job) > before {
            times.push(second);
        }
        assert!(attempts(&log, &job) < 9);
    }
    assert!(times.len() >= 3, "{times:?}");
    assert!(times.windows(3).all(|t| t[2] - t[1] > t[1] - t[0]), "{times:?}");
    log.run_to_the_end();
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
}

#[test]
fn an_order_somebody_held_a_moment_ago_is_not_lost() {
    let mut log = at_generate();
    let job = log.jobs(1, Train)[0].clone();
    log.now_ms = 1_000_000;
    let held = HeldJob { run: log.id.clone(), cycle: 1, job: job.clone() };
    log.fleet.last_held_ago_ms.insert((WorkKind::Generate, held.clone()), 5_000);
    log.coordinate();
    assert_eq!(attempts(&log, &job), 1, "it is on its way to another agent");
    log.fleet.last_held_ago_ms.insert((WorkKind::Generate, held), WAITING.unclaimed_ms);
    log.coordinate();
    assert_eq!(attempts(&log, &job), 2);
}

#[test]
fn the_last_jobs_are_given_to_idle_boxes_as_well() {
    let mut log = at_generate();
    let jobs = log.jobs(1, Train);
    let last = jobs.last().unwrap().clone();
    log.generate_all_but(&[&last]);
    log.hold(1, &last);
    log.coordinate();
    assert_eq!(attempts(&log, &last), 1, "it has only begun");
    log.now_ms = 100 * log.records().len() as u64 + 30_000;
    log.coordinate();
    assert_eq!(attempts(&log, &last), 2);
    log.now_ms += 30_000;
    log.coordinate();
    assert_eq!(attempts(&log, &last), 2, "one hedge is enough");
    log.now_ms += 1_000_000;
    log.coordinate();
    assert_eq!(attempts(&log, &last), 3, "until it is overdue");
}

#[test]
fn no_order_is_written_again_while_nobody_is_idle_or_the_run_is_paused() {
    let mut log = at_generate();
    let job = log.jobs(1, Train)[0].clone();
    log.now_ms = 10_000_000;
    log.fleet.generators.clear();
    log.coordinate();
    assert_eq!(attempts(&log, &job), 1);
    log = at_generate();
    log.control(v1::control::Action::Pause);
    log.now_ms = 10_000_000;
    log.coordinate();
    assert_eq!(attempts(&log, &job), 1);
}

/// All but the last job are done; a slow agent holds that one, and a fast one is idle.
fn at_tail(slow: f64, fast: f64, left: u32) -> (Log, String) {
    let mut log = at_generate();
    let last = log.jobs(1, Train).last().unwrap().clone();
    log.generate_all_but(&[&last]);
    log.hold(1, &last);
    (log.fleet.generators[0].tokens_per_s, log.fleet.generators[0].remaining_samples) =
        (slow, left);
    log.fleet.generators[1].tokens_per_s = fast;
    (log, last)
}

#[test]
fn what_a_slow_box_is_still_at_is_given_to_a_fast_one_that_gains_by_it() {
    // Jobs of 8 samples of 2 tokens: 16 s on the slow agent, 2 s on the fast one.
    let (mut log, last) = at_tail(1.0, 8.0, 8);
    log.coordinate();
    assert_eq!(attempts(&log, &last), 2, "begun again at once");
    // 2 s on the slow agent: no gain.
    let (mut log, last) = at_tail(1.0, 8.0, 1);
    log.coordinate();
    assert_eq!(attempts(&log, &last), 1);
    let (mut log, last) = at_tail(1.0, 1.0, 8);
    log.coordinate();
    assert_eq!(attempts(&log, &last), 1, "as slow itself");
}

#[test]
fn the_last_jobs_of_a_box_that_fell_silent_are_not_waited_for() {
    let (mut log, last) = at_tail(1.0, 1.0, 8);
    log.now_ms = 100 * log.records().len() as u64 + 60_000;
    log.fleet.generators.remove(0);
    let held = HeldJob { run: log.id.clone(), cycle: 1, job: last.clone() };
    log.fleet.last_held_ago_ms.insert((WorkKind::Generate, held.clone()), 3_000);
    log.coordinate();
    assert_eq!(attempts(&log, &last), 1, "it may speak again");
    log.fleet.last_held_ago_ms.insert((WorkKind::Generate, held), 7_000);
    log.coordinate();
    assert_eq!(attempts(&log, &last), 2);
}

#[test]
fn orders_tell_what_is_planned_behind_them() {
    let mut log = Log::new(raft(1));
    for (generator, rate) in log.fleet.generators.iter_mut().zip([10.0, 30.0]) {
        generator.tokens_per_s = rate;
    }
    log.coordinate();
    let orders = log.generate_orders().filter(|order| order.cycle == 1);
    let behind: Vec<_> = orders.map(|order| order.behind.clone().unwrap()).collect();
    assert!(behind.iter().all(|b| (b.tokens_per_s, b.fastest_tokens_per_s) == (40.0, 30.0)));
    let samples: Vec<u64> = behind.iter().map(|behind| behind.samples).collect();
    assert!(samples.windows(2).all(|two| two[0] > two[1]), "{samples:?}");
    assert_eq!(samples.last(), Some(&0));
    let fastest = &log.fleet.generators[1];
    assert!(behind.iter().all(|behind| behind.fastest == fastest.agent));
    assert!(behind.iter().all(|behind| behind.fastest_samples == fastest.remaining_samples));
    let mut unknown = Log::new(raft(1));
    unknown.coordinate();
    assert!(unknown.generate_orders().all(|order| order.behind.is_none()));
}
