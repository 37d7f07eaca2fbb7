//! Whole runs against an in-memory log that, like the real one, accepts each subject once.

mod authors;
mod channels;
mod contradictions;
mod course;
mod fold;
mod fork;
mod growth;
mod log;
mod objectives;
mod proof;
mod split_training;
mod state;
mod suites;
mod tampered;
mod teaching;
mod trouble;

use wire::v1;

use self::log::{Log, raft, sft, tree, watched};
use crate::{AuditCounts, RunPhase, audit_records};

#[test]
fn a_raft_run_ends_with_every_planned_sample_counted_once() {
    let mut log = Log::new(raft(3));
    log.run_to_the_end();
    let run = log.run();
    assert_eq!(run.done.as_ref().unwrap().status(), v1::done::Status::Succeeded);
    assert_eq!(run.anomalies, []);
    let report = audit_records(log.records()).unwrap();
    assert_eq!(report.findings, []);
    // 3 cycles of 20 prompts × 8, and 4 measurements of 10 prompts × 2.
    assert_eq!(report.counts.planned_samples, 3 * 160 + 4 * 20);
    assert_eq!(report.counts.accepted_samples, report.counts.planned_samples);
    assert_eq!(report.counts.judged_samples, report.counts.planned_samples);
    let AuditCounts { kept_samples, checkpoints, evals, facts, .. } = report.counts;
    assert_eq!((kept_samples, checkpoints, evals), (3 * 20, 4, 4));
    assert_eq!(facts, log.records().len() as u64);
    assert_eq!(run.cycles[&0].done.as_ref().unwrap().sampled, 0);
    assert_eq!(run.cycles[&3].done.as_ref().unwrap().sampled, 160);
}

#[test]
fn each_cycle_samples_with_the_adapter_of_the_one_before() {
    let mut log = Log::new(raft(2));
    log.run_to_the_end();
    let adapters = |cycle: u32, purpose: v1::Purpose| -> Vec<String> {
        let mut found: Vec<String> = log
            .generate_orders()
            .filter(|order| order.cycle == cycle && order.purpose() == purpose)
            .map(|order| order.adapter.clone().map_or(String::new(), |tree| tree.manifest))
            .collect();
        found.dedup();
        found
    };
    assert_eq!(adapters(0, v1::Purpose::Heldout), [""]);
    assert_eq!(adapters(1, v1::Purpose::Train), [""]);
    assert_eq!(adapters(1, v1::Purpose::Heldout), ["adapter-1"]);
    assert_eq!(adapters(2, v1::Purpose::Train), ["adapter-1"]);
    assert_eq!(adapters(2, v1::Purpose::Heldout), ["adapter-2"]);
}

#[test]
fn a_run_of_no_cycles_measures_its_base_and_trains_nothing() {
    let mut spec = raft(0);
    spec.base.as_mut().unwrap().adapter = tree("adapter");
    let mut log = Log::new(spec);
    log.run_to_the_end();
    let run = log.run();
    assert_eq!(run.done.as_ref().unwrap().status(), v1::done::Status::Succeeded);
    assert_eq!(log.train_orders().count(), 0);
    let measures = |order: &v1::GenerateOrder| {
        order.purpose() == v1::Purpose::Heldout && order.adapter == tree("adapter")
    };
    assert!(log.generate_orders().all(measures));
    let report = audit_records(log.records()).unwrap();
    assert_eq!(report.findings, []);
    let AuditCounts { planned_samples, checkpoints, evals, .. } = report.counts;
    assert_eq!((planned_samples, checkpoints, evals), (20, 1, 1));
    let done = run.cycles[&0].done.as_ref().unwrap();
    assert_eq!(done.heldout.map(|rate| (rate.mean, rate.prompts)), Some((0.5, 10)));
}

#[test]
fn a_measurement_without_a_verifier_ends_with_its_samples() {
    let mut log = Log::start_raft(0, |raft| raft.verifier = None);
    log.coordinate();
    log.generate();
    log.coordinate();
    assert_eq!(log.run().current_phase(), RunPhase::Evaluate, "the text is not measured yet");
    log.evaluate();
    log.coordinate();
    let run = log.run();
    assert_eq!(run.done.unwrap().status(), v1::done::Status::Succeeded);
    assert_eq!(run.cycles[&0].done.as_ref().unwrap().heldout, None);
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
}

#[test]
fn an_sft_run_trains_once_and_waits_for_its_evals() {
    let mut log = Log::new(sft());
    log.coordinate();
    log.train();
    log.coordinate();
    assert_eq!(log.run().current_phase(), RunPhase::Evaluate);
    log.evaluate();
    log.coordinate();
    assert_eq!(log.run().done.unwrap().status(), v1::done::Status::Succeeded);
}

#[test]
fn a_watched_run_orders_nothing_and_ends_with_its_last_checkpoints_evals() {
    let mut log = Log::new(watched());
    log.coordinate();
    assert_eq!(log.records().len(), 1, "nobody is told to train");
    assert_eq!(log.run().current_phase(), RunPhase::Train);
    log.find_checkpoint(10);
    log.evaluate();
    log.coordinate();
    assert_eq!(log.run().current_phase(), RunPhase::Train, "more may come");
    log.find_checkpoint(30);
    log.coordinate();
    assert_eq!(log.run().current_phase(), RunPhase::Evaluate);
    log.evaluate();
    log.coordinate();
    assert_eq!(log.run().done.unwrap().status(), v1::done::Status::Succeeded);
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
}

#[test]
fn deciding_twice_writes_nothing_twice() {
    let mut log = Log::new(raft(1));
    log.coordinate();
    let facts = log.records().len();
    log.coordinate();
    assert_eq!(log.records().len(), facts);
}

#[test]
fn a_paused_run_starts_nothing_and_a_resumed_one_orders_again_what_is_missing() {
    let mut log = Log::new(raft(1));
    log.until(RunPhase::Generate);
    let ordered = log.generate_orders().count();
    log.control(v1::control::Action::Pause);
    log.coordinate();
    assert_eq!(log.generate_orders().count(), ordered);
    log.control(v1::control::Action::Resume);
    log.coordinate();
    assert!(log.generate_orders().any(|order| order.cycle == 1 && order.attempt == 2));
    log.run_to_the_end();
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
}

#[test]
fn a_cancelled_run_ends_and_stays_ended() {
    let mut log = Log::new(raft(2));
    log.until(RunPhase::Generate);
    log.control(v1::control::Action::Cancel);
    log.coordinate();
    assert_eq!(log.run().done.unwrap().status(), v1::done::Status::Cancelled);
    let facts = log.records().len();
    log.coordinate();
    assert_eq!(log.records().len(), facts);
}

#[test]
fn samples_of_another_policy_are_never_selected() {
    let mut log = Log::new(raft(1));
    log.until(RunPhase::Generate);
    log.lie_about_the_policy_once();
    let run = log.run();
    let void = run.cycles[&1].jobs.values().find(|job| job.is_void()).unwrap();
    let samples = void.samples.as_ref().unwrap();
    assert!(samples.count > 0 && samples.samples.is_empty(), "void samples are only counted");
    log.run_to_the_end();
    let run = log.run();
    let selected = run.cycles[&1].selected.as_ref().unwrap();
    assert!(selected.dropped["void"] > 0);
    assert_eq!(selected.considered, 160);
    assert_eq!(run.anomalies.len(), 1);
    assert!(run.anomalies[0].description.contains("another policy"), "{:?}", run.anomalies);
}

#[test]
fn samples_of_a_policy_nobody_could_verify_are_void_unless_the_spec_accepts_them() {
    let void = |accepts: bool| {
        let mut spec = raft(1);
        let Some(v1::spec::Kind::Raft(raft)) = &mut spec.kind else { panic!("a raft run") };
        raft.accept_unverified_policy = accepts;
        let mut log = Log::new(spec);
        log.until(RunPhase::Generate);
        assert!(log.generate_orders().all(|order| order.accept_unverified_policy == accepts));
        log.generate_somewhere();
        log.run_to_the_end();
        let report = audit_records(log.records()).unwrap();
        let findings: Vec<String> =
            report.findings.into_iter().map(|found| found.description).collect();
        let void = log.run().cycles[&1].selected.as_ref().unwrap().dropped.get("void").copied();
        (void, findings, report.caveats)
    };
    let (dropped, findings, caveats) = void(false);
    assert!(dropped.is_some_and(|count| count > 0), "{dropped:?}");
    let unaccepted = |what: &String| what.contains("does not accept that nobody knows");
    assert!(!findings.is_empty() && findings.iter().all(unaccepted), "{findings:?}");
    assert_eq!(caveats, Vec::<String>::new());

    let (dropped, findings, caveats) = void(true);
    assert_eq!((dropped, findings), (None, Vec::new()));
    let (count, what) = caveats[0].split_once(' ').unwrap();
    assert!(count.parse::<u32>().unwrap() > 0, "{caveats:?}");
    assert_eq!(
        what,
        "samples by g1 count, as the spec accepts, though nobody knows what generated them"
    );
}

#[test]
fn a_cycle_in_which_nothing_passed_leaves_the_policy_as_it_was() {
    let mut log = Log::new(raft(2));
    log.nothing_passes_in_cycle(1);
    log.run_to_the_end();
    let run = log.run();
    assert_eq!(run.done.as_ref().unwrap().status(), v1::done::Status::Succeeded);
    assert_eq!(run.cycles[&1].selected.as_ref().unwrap().kept, 0);
    assert!(run.cycles[&1].checkpoints.is_empty());
    assert_eq!(run.parent_checkpoint(2).unwrap().cycle, 0);
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
}

#[test]
fn a_final_failure_ends_the_run_with_its_reason() {
    let mut log = Log::new(sft());
    log.coordinate();
    log.fail("train", "0", "out of memory");
    log.coordinate();
    let done = log.run().done.unwrap();
    assert_eq!(done.status(), v1::done::Status::Failed);
    assert_eq!(done.message, "train 0: out of memory");
}
