//! Agents that report a canary, one of them with wrong weights.

use wire::{FactBody, v1};

use super::log::{Log, raft};
use crate::{FleetMember, RunPhase, audit_records, canary_agreement};

/// Canary log-probabilities of the ordered policy, of an agent that rounds differently, and of
/// another policy.
const RIGHT: [f32; 3] = [-1.0, -2.0, -0.5];
const NEAR: [f32; 3] = [-1.01, -1.99, -0.5];
const WRONG: [f32; 3] = [-1.0, -2.6, -0.1];

fn proven(cycles: u32) -> v1::Spec {
    let mut spec = raft(cycles);
    let Some(v1::spec::Kind::Raft(raft)) = &mut spec.kind else { panic!("a raft run") };
    raft.proof = Some(v1::spec::Proof { canary: true, tolerance: 0.05, ..Default::default() });
    spec
}

/// The agents take the open orders in turns; each reports its canary.
fn generate(log: &mut Log, boxes: &[(&str, [f32; 3])]) {
    let done = done(log);
    let open: Vec<v1::GenerateOrder> = log
        .generate_orders()
        .filter(|order| !done.contains(&(order.cycle, order.job.clone())))
        .cloned()
        .collect();
    for (order, (agent, canary)) in open.iter().zip(boxes.iter().cycle()) {
        log.show(order, agent, canary);
    }
}

fn done(log: &Log) -> Vec<(u32, String)> {
    let samples = log.records().iter().filter_map(|record| match &record.fact.body {
        FactBody::Samples(samples) => Some((samples.cycle, samples.job.clone())),
        _ => None,
    });
    samples.collect()
}

fn quarantines(log: &Log) -> Vec<&v1::Quarantine> {
    let found = log.records().iter().filter_map(|record| match &record.fact.body {
        FactBody::Quarantine(quarantine) => Some(quarantine),
        _ => None,
    });
    found.collect()
}

/// Finishes a run in which these agents take turns; a quarantined agent takes none.
fn finish(log: &mut Log, boxes: &[(&str, [f32; 3])], trainer: &[f32]) {
    for _ in 0..100 {
        log.coordinate();
        if log.run().current_phase() == RunPhase::Done {
            return;
        }
        let out: Vec<String> = quarantines(log).iter().map(|found| found.agent.clone()).collect();
        let free: Vec<(&str, [f32; 3])> = boxes
            .iter()
            .filter(|(agent, _)| !out.iter().any(|out| out == agent))
            .copied()
            .collect();
        generate(log, &free);
        log.verify();
        log.train_and_show(trainer);
        log.evaluate();
    }
    panic!("the run does not end");
}

#[test]
fn a_box_of_three_that_samples_with_something_else_is_told_and_its_samples_are_drawn_again() {
    let mut log = Log::new(proven(2));
    finish(&mut log, &[("a", RIGHT), ("b", WRONG), ("c", NEAR)], &RIGHT);
    let run = log.run();
    assert_eq!(run.done.as_ref().unwrap().status(), v1::done::Status::Succeeded);
    let [found] = quarantines(&log)[..] else { panic!("{:?}", quarantines(&log)) };
    assert_eq!((&*found.agent, &*found.base, &*found.adapter), ("b", "base", ""));
    assert_eq!(found.agreed, ["a", "c"]);
    assert!(found.distance.is_some_and(|apart| (apart - 1.0 / 3.0).abs() < 0.01), "{found:?}");
    assert!(!found.jobs.is_empty() && found.jobs.iter().all(|job| job.again.ends_with("-2")));
    let (by, considered) = run.cycles.values().fold((Vec::new(), 0), |(mut by, sum), cycle| {
        by.extend(cycle.done.iter().flat_map(|done| done.samples_by_agent.keys().cloned()));
        (by, sum + cycle.selected.as_ref().map_or(0, |selected| selected.considered))
    });
    assert!(!by.contains(&"b".to_owned()), "none of its samples count: {by:?}");
    assert_eq!(considered, 2 * 160, "and none is missing");
    let report = audit_records(log.records()).unwrap();
    assert_eq!(report.findings, []);
    assert_eq!(report.counts.accepted_samples, report.counts.planned_samples);
}

#[test]
fn an_order_asks_for_what_shows_its_policy_best() {
    let mut log = Log::new(proven(2));
    finish(&mut log, &[("a", RIGHT)], &RIGHT);
    let texts = |cycle: u32, purpose: v1::Purpose| {
        let orders = log.generate_orders();
        let orders = orders.filter(|order| order.cycle == cycle && order.purpose() == purpose);
        let mut texts: Vec<String> = orders.map(|order| order.canary.clone()).collect();
        texts.dedup();
        texts
    };
    let [base] = &texts(1, v1::Purpose::Train)[..] else { panic!("one text a policy") };
    assert!(base.contains("0+1=\n1+1="), "of a base, the prompts: {base}");
    assert_eq!(texts(0, v1::Purpose::Heldout).first(), Some(base), "the same policy");
    let [trained] = &texts(2, v1::Purpose::Train)[..] else { panic!("one text a policy") };
    assert!(trained.contains("+1=answer 1"), "of an adapter, what it was trained on: {trained}");
    assert_eq!(texts(1, v1::Purpose::Heldout).first(), Some(trained));
    assert_eq!(log.train_orders().next().unwrap().canary, *trained);
    assert_eq!(audit_records(log.records()).unwrap().findings, []);

    let mut log = Log::new(raft(1));
    log.run_to_the_end();
    assert!(log.generate_orders().all(|order| order.canary.is_empty()), "nobody asked");
}

#[test]
fn of_two_boxes_nobody_knows_who_is_right_but_for_what_was_trained_here() {
    let mut log = Log::new(proven(1));
    log.until(RunPhase::Generate);
    generate(&mut log, &[("a", RIGHT), ("b", WRONG)]);
    log.coordinate();
    assert!(quarantines(&log).is_empty());
    let found = canary_agreement(&log.run(), 1, v1::Purpose::Train).unwrap();
    assert!(!found.decided && found.values.len() == 2, "{found:?}");
    log.verify();
    log.coordinate();
    let told = audit_records(log.records()).unwrap().caveats;
    assert!(told[0].contains("no majority shows which are right"), "{told:?}");
    log.train_and_show(&WRONG);
    log.coordinate();
    assert!(log.jobs(1, v1::Purpose::Heldout).len() > 1);
    generate(&mut log, &[("a", RIGHT), ("b", NEAR)]);
    log.coordinate();
    assert!(quarantines(&log).is_empty(), "more than half differ from the trainer");

    let mut log = Log::new(proven(1));
    finish(&mut log, &[("a", RIGHT), ("b", RIGHT)], &NEAR);
    assert!(quarantines(&log).is_empty());
    assert_trainer_is_believed(Log::new(proven(1)));
}

/// Checks that a box alone is quarantined if it differs from the trainer of its checkpoint.
fn assert_trainer_is_believed(mut log: Log) {
    log.until(RunPhase::Generate);
    generate(&mut log, &[("a", RIGHT)]);
    log.verify();
    log.coordinate();
    while log.run().cycles[&1].final_checkpoint().is_none() {
        log.train_and_show(&WRONG);
        log.coordinate();
    }
    generate(&mut log, &[("a", RIGHT)]);
    log.coordinate();
    let [found] = quarantines(&log)[..] else { panic!("{:?}", quarantines(&log)) };
    assert_eq!((&*found.agent, &found.agreed[..]), ("a", &["trainer of 1".to_owned()][..]));
}

#[test]
fn what_several_boxes_trained_is_judged_by_the_canary_of_the_one_that_merged() {
    let mut spec = proven(1);
    let Some(v1::spec::Kind::Raft(raft)) = &mut spec.kind else { panic!("a raft run") };
    raft.training.as_mut().unwrap().across =
        Some(v1::Across { every: 4, outer_rate: 1.0, ..Default::default() });
    let mut log = Log::new(spec);
    let trainer = |agent: &str| FleetMember { agent: agent.into(), ..FleetMember::default() };
    log.fleet.trainers = ["t1", "t2"].map(trainer).into();
    assert_trainer_is_believed(log);
}

#[test]
fn a_box_alone_is_no_witness_against_itself() {
    for figures in [[WRONG, RIGHT], [RIGHT, WRONG]] {
        let mut log = Log::new(proven(1));
        log.until(RunPhase::Generate);
        generate(&mut log, &figures.map(|figure| ("a", figure)));
        log.coordinate();
        assert!(quarantines(&log).is_empty(), "{:?}", quarantines(&log));
    }
}

#[test]
fn samples_that_show_nothing_are_void_and_so_are_those_of_another_tokenizer() {
    let mut log = Log::new(proven(1));
    log.until(RunPhase::Generate);
    log.generate();
    let dropped = |log: &mut Log| {
        log.run_to_the_end();
        let anomaly = log.run().anomalies.first().map(|anomaly| anomaly.description.clone());
        (log.run().cycles[&1].selected.as_ref().unwrap().dropped.get("void").copied(), anomaly)
    };
    let (void, why) = dropped(&mut log);
    assert_eq!(void, Some(160));
    assert!(why.unwrap().contains("have no canary log-probs"));
}

#[test]
fn a_quarantine_may_follow_from_samples_of_an_archived_cycle() {
    let mut log = Log::new(proven(1));
    log.coordinate();
    let orders: Vec<v1::GenerateOrder> = log.generate_orders().cloned().collect();
    for order in orders.iter().filter(|order| order.cycle == 0) {
        log.show(order, "b", &WRONG);
    }
    log.verify();
    log.evaluate();
    log.coordinate();
    assert!(log.run().cycles[&0].done.is_some() && quarantines(&log).is_empty());
    log.archive(0);
    generate(&mut log, &[("a", RIGHT), ("c", NEAR)]);
    log.coordinate();
    let [found] = quarantines(&log)[..] else { panic!("{:?}", quarantines(&log)) };
    assert_eq!((&*found.agent, &found.jobs[..]), ("b", &[][..]));
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
}

#[test]
fn a_quarantine_that_follows_from_nothing_is_found() {
    let mut log = Log::new(proven(1));
    log.until(RunPhase::Generate);
    generate(&mut log, &[("a", RIGHT), ("b", NEAR)]);
    let false_one = v1::Quarantine {
        agent: "b".into(),
        base: "base".into(),
        agreed: vec!["a".into()],
        ..Default::default()
    };
    log.quarantine(false_one);
    log.verify();
    log.coordinate();
    let found = audit_records(log.records()).unwrap().findings;
    assert!(found.iter().any(|found| found.description.contains("does not follow")), "{found:?}");
}
