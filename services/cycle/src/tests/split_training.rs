//! Trainings on several boxes.

use wire::{FactBody, FactKey, TrainPart, v1};

use super::log::{Log, raft, sft, tree};
use crate::{FleetMember, RunPhase, SplitTraining, audit_records};

const ACROSS: v1::Across = v1::Across {
    workers: 0,
    every: 4,
    outer_rate: 1.0,
    outer_momentum: 0.0,
    method: 0,
    send_share: 0.0,
};

/// Starts an SFT run of 50 steps on these trainers.
fn start(trainers: &[&str], across: v1::Across, save_every: u32) -> Log {
    let mut spec = sft();
    let training = v1::Training {
        lora: Some(v1::Lora::default()),
        across: Some(across),
        save_every,
        ..Default::default()
    };
    if let Some(v1::spec::Kind::Sft(sft)) = &mut spec.kind {
        sft.training = Some(training);
    }
    with_trainers(Log::new(spec), trainers)
}

fn with_trainers(mut log: Log, trainers: &[&str]) -> Log {
    let member = |agent: &&str| FleetMember { agent: (*agent).into(), ..FleetMember::default() };
    log.fleet.trainers = trainers.iter().map(member).collect();
    log
}

fn training(log: &Log, cycle: u32) -> SplitTraining {
    log.run().cycles[&cycle].split_training.clone()
}

/// Returns first step and length of each slice of an outer step.
fn slices(log: &Log, outer: u32) -> Vec<(u32, u32)> {
    let plan = training(log, 0).outer_steps[&outer].plan.clone().unwrap();
    plan.slices.iter().map(|slice| (slice.first, slice.steps)).collect()
}

fn assert_clean(log: &Log) {
    assert_eq!(log.run().anomalies, []);
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
}

fn merge_fact(outer: u32, start: &str, deltas: &[&str]) -> FactBody {
    FactBody::Merge(v1::Merge {
        run: "r1".into(),
        outer,
        start: start.into(),
        deltas: deltas.iter().map(|delta| (*delta).to_owned()).collect(),
        tree: tree("merged"),
        ..Default::default()
    })
}

#[test]
fn each_step_counts_once_and_the_last_merge_is_the_checkpoint() {
    let mut log = start(&["t1", "t2", "t3"], ACROSS, 20);
    log.run_to_the_end();
    assert_clean(&log);
    let run = log.run();
    let across = &run.cycles[&0].split_training;
    assert_eq!((across.counted_steps(), across.last_merge().unwrap().0), (50, 5));
    let checkpoints: Vec<_> = run.cycles[&0].checkpoints.values().collect();
    let steps: Vec<(u32, bool)> = checkpoints.iter().map(|it| (it.step, it.r#final)).collect();
    assert_eq!(steps, [(27, false), (50, true)], "every 20 steps, after a merge");
    let last = checkpoints.last().unwrap();
    assert_eq!((last.tokens, last.trained_tokens, last.steps), (500, 200, 50));
    assert_eq!((last.tree.clone(), last.parent.clone()), (tree("merge-0-5"), tree("base")));
    assert_eq!(slices(&log, 1), [(0, 1), (1, 1), (2, 1)], "short, before any speed is known");
    assert_eq!(slices(&log, 2), [(3, 4), (7, 4), (11, 4)]);
    assert_eq!(slices(&log, 5), [(39, 4), (43, 3), (46, 4)], "the rest");
}

#[test]
fn a_faster_box_has_more_steps_and_continues_with_its_state() {
    let mut log = start(&["t1", "t2"], ACROSS, 0);
    log.speeds = [("t1".into(), 1.0), ("t2".into(), 3.0)].into();
    log.run_to_the_end();
    assert_clean(&log);
    assert_eq!(slices(&log, 1), [(0, 1), (1, 1)], "before any speed is known");
    assert_eq!(slices(&log, 2), [(2, 2), (4, 6)]);
    let plan = training(&log, 0).outer_steps[&3].plan.clone().unwrap();
    let states: Vec<_> = plan.slices.iter().map(|slice| slice.state.as_str()).collect();
    assert_eq!(states, ["delta-0-2-1", "delta-0-2-2"]);
}

#[test]
fn a_box_that_joins_later_has_slices_from_the_next_outer_step_on() {
    let mut log = start(&["t1", "t2"], ACROSS, 0);
    let merges = |log: &Log| training(log, 0).last_merge().map_or(0, |(outer, _)| outer);
    log.coordinate();
    log.train();
    while merges(&log) < 2 {
        log.coordinate();
        log.train();
    }
    log = with_trainers(log, &["t1", "t2", "t3"]);
    log.run_to_the_end();
    assert_clean(&log);
    let outer_steps = training(&log, 0).outer_steps;
    let joined = |outer: u32| {
        let plan = outer_steps[&outer].plan.as_ref().unwrap();
        plan.slices.iter().any(|slice| slice.agent == "t3")
    };
    assert_eq!([1, 2, 3].map(joined), [false, false, true]);
    let counted = training(&log, 0).counted_deltas().filter(|delta| delta.agent == "t3").count();
    assert!(counted > 0, "its steps count");
}

#[test]
fn a_soup_is_shared_by_the_speeds_of_earlier_trainings_of_its_base() {
    let method = v1::across::Method::Soup.into();
    let planned = |base: &str| {
        let mut log = start(&["t1", "t2"], v1::Across { method, ..ACROSS }, 0);
        log.total_steps = 40;
        for (member, tokens_per_s) in log.fleet.trainers.iter_mut().zip([100.0, 300.0]) {
            let base = base.to_owned();
            member.training_speed = Some(v1::agent_status::TrainingSpeed { base, tokens_per_s });
        }
        log.coordinate();
        log.train();
        log.coordinate();
        slices(&log, 1)
    };
    assert_eq!(planned("base"), [(0, 10), (10, 30)]);
    assert_eq!(planned("other"), [(0, 20), (20, 20)], "of another base it says nothing");
}

#[test]
fn the_fastest_boxes_train_if_there_are_more_than_asked_for() {
    let mut log = start(&["t1", "t3"], v1::Across { workers: 2, ..ACROSS }, 0);
    log.speeds = [("t1".into(), 1.0), ("t2".into(), 2.0), ("t3".into(), 3.0)].into();
    log.coordinate();
    log.train();
    let fleets: [&[&str]; 3] = [&["t1", "t3"], &["t2", "t3", "t4"], &["t1", "t2", "t3"]];
    for trainers in fleets {
        log = with_trainers(log, trainers);
        log.coordinate();
        log.train();
        log.coordinate();
        log.train();
    }
    let boxes = |outer: u32| {
        let plan = training(&log, 0).outer_steps[&outer].plan.clone().unwrap();
        plan.slices.into_iter().map(|slice| slice.agent).collect::<Vec<_>>()
    };
    assert_eq!(boxes(1), ["t1", "t3"]);
    assert_eq!(boxes(2), ["t2", "t3"], "the speeds of t2 and t4 are unknown");
    assert_eq!(boxes(3), ["t2", "t3"]);
}

#[test]
fn steps_of_a_dead_box_are_planned_again_and_its_late_result_does_not_count() {
    let mut log = start(&["t1", "t2", "t3"], ACROSS, 0);
    log.speeds = [("t2".into(), 0.0)].into();
    for _ in 0..4 {
        log.coordinate();
        log.train();
    }
    let step = |log: &Log| training(log, 0).outer_steps[&1].clone();
    log.now_ms += 10_000;
    log.coordinate();
    assert_eq!(step(&log).closed, None, "a box of unknown speed may be slow");
    log.now_ms += 60_000;
    log.coordinate();
    assert_eq!(step(&log).closed.unwrap().slices, [1, 3]);
    let order = log.train_orders().find(|order| match &order.part {
        Some(v1::train_order::Part::Slice(slice)) => slice.slice == 2,
        _ => false,
    });
    let order = order.unwrap().clone();
    let Some(v1::train_order::Part::Slice(slice)) = &order.part else { panic!("a slice") };
    let late = log.delta(&order, slice, 1.0);
    log.write(FactKey::Delta { cycle: 0, outer: 1, slice: 2 }, FactBody::Delta(late));
    log.fleet.trainers.remove(1);
    log.speeds.clear();
    log.run_to_the_end();
    assert_clean(&log);
    assert_eq!(slices(&log, 2), [(1, 1), (3, 4)], "the missing step comes first");
    assert_eq!(training(&log, 0).counted_deltas().map(|delta| delta.steps).sum::<u32>(), 50);
    let report = training(&log, 0).report_split().unwrap();
    let steps: Vec<u32> = report.boxes.values().map(|share| share.steps).collect();
    assert_eq!((report.repeated_steps, steps.iter().sum::<u32>()), (1, 50));
    assert!(report.elapsed_s > 0.0 && report.speedup() > 0.0, "{report:?}");
}

#[test]
fn a_report_names_the_trainings_that_a_soup_kept() {
    let mut log = start(&["t1", "t2", "t3"], ACROSS, 0);
    log.run_to_the_end();
    let mut training = training(&log, 0);
    assert_eq!(training.report_split().unwrap().soup, None);
    let later = training.outer_steps.split_off(&3);
    training.outer_steps.retain(|outer, _| *outer == 2);
    let choose = |training: &mut SplitTraining, outer, kept: &[u32], heldout_nll| {
        let merge = training.outer_steps.get_mut(&outer).unwrap().merge.as_mut().unwrap();
        (merge.kept, merge.heldout_nll) = (kept.to_vec(), heldout_nll);
        training.report_split().unwrap().soup.unwrap()
    };
    let soup = choose(&mut training, 2, &[1, 3], 0.5);
    assert_eq!((soup.trained, soup.heldout_nll), (3, 0.5));
    assert_eq!(soup.kept, ["t1", "t3"]);
    // The steps of a dead box, which did not help.
    training.outer_steps.extend(later.into_iter().take(1));
    let soup = choose(&mut training, 3, &[], 0.4);
    assert_eq!((soup.trained, soup.heldout_nll), (6, 0.4));
    assert_eq!(soup.kept, ["t1", "t3"]);
    // A merge of one training chooses nothing.
    let soup = choose(&mut training, 2, &[], 0.0);
    assert_eq!((soup.trained, soup.kept.len()), (6, 3));
}

#[test]
fn a_cycle_starts_from_the_adapter_of_the_one_before() {
    let mut spec = raft(2);
    if let Some(v1::spec::Kind::Raft(raft)) = &mut spec.kind {
        raft.training.as_mut().unwrap().across = Some(v1::Across { workers: 1, ..ACROSS });
    }
    let mut log = with_trainers(Log::new(spec), &["t1", "t2"]);
    log.run_to_the_end();
    assert_clean(&log);
    let first = |cycle| *training(&log, cycle).outer_steps.keys().next().unwrap();
    assert_eq!((first(1), first(2)), (0, 1), "only the first adapter is new");
    let plan = training(&log, 2).outer_steps[&1].plan.clone().unwrap();
    assert_eq!(plan.slices.len(), 1, "one worker");
    let delta = training(&log, 2).outer_steps[&1].slices[&1].delta.clone().unwrap();
    assert_eq!(
        delta.start,
        training(&log, 1).last_merge().unwrap().1.tree.clone().unwrap().manifest
    );
}

#[test]
fn boxes_that_send_changes_can_derive_merges_from_one_that_is_stored() {
    let across = v1::Across { every: 2, send_share: 0.01, ..ACROSS };
    let mut log = start(&["t1", "t2"], across, 0);
    log.run_to_the_end();
    assert_clean(&log);
    let merges: Vec<_> = training(&log, 0).outer_steps.into_iter().collect();
    let stored = merges.iter().filter(|(_, step)| !step.merge.as_ref().unwrap().derived);
    let stored: Vec<u32> = stored.map(|(outer, _)| *outer).collect();
    assert_eq!(stored, [0, 8, 13], "the new adapter, every 8th and the last");
    let listed = |outer| {
        let order = log.train_orders().find_map(|order| match &order.part {
            Some(v1::train_order::Part::Slice(slice)) if slice.outer == outer => Some(slice),
            _ => None,
        });
        let merges = order.unwrap().derivation.iter();
        merges.map(|merge| (merge.outer, merge.deltas.len())).collect::<Vec<_>>()
    };
    assert_eq!((listed(1), listed(2)), (vec![], vec![(1, 2)]));
    assert_eq!(listed(8).len(), 7);
    assert_eq!((listed(9), listed(10)), (vec![], vec![(9, 2)]));
    let order = log.train_orders().find_map(|order| match &order.part {
        Some(v1::train_order::Part::Merge(merge)) if merge.outer == 8 => Some(merge.clone()),
        _ => None,
    });
    let order = order.unwrap();
    assert_eq!((order.derivation.len(), order.derived), (7, false));
    assert_eq!(order.derivation[0].start, tree("merge-0-0"));
}

#[test]
fn stacked_weights_begin_with_a_new_optimizer_state() {
    let method = v1::across::Method::Stack.into();
    let mut log = start(&["t1", "t2"], v1::Across { method, ..ACROSS }, 0);
    log.run_to_the_end();
    assert_clean(&log);
    let plan = training(&log, 0).outer_steps[&3].plan.clone().unwrap();
    assert!(plan.slices.iter().all(|slice| slice.state.is_empty()), "{plan:?}");
}

#[test]
fn facts_that_contradict_an_outer_step_are_found() {
    let mut log = start(&["t1", "t2"], ACROSS, 0);
    log.coordinate();
    log.train();
    log.coordinate();
    let plan = |outer, first| {
        let slice = v1::slice_plan::Slice { first, steps: 3, ..Default::default() };
        FactBody::SlicePlan(v1::SlicePlan { cycle: 0, outer, slices: vec![slice.clone(), slice] })
    };
    let delta = |slice, (first, steps), start: &str| {
        FactBody::Delta(v1::Delta {
            run: "r1".into(),
            outer: 1,
            slice,
            start: start.into(),
            tree: tree("other"),
            first,
            steps,
            trained_tokens: 1,
            total_steps: 50,
            ..Default::default()
        })
    };
    let close =
        |outer| FactBody::SliceClose(v1::SliceClose { cycle: 0, outer, slices: vec![1, 2, 3] });
    let (cycle, outer) = (0, 1);
    log.write(FactKey::Delta { cycle, outer, slice: 3 }, delta(3, (0, 4), "merge-0-0"));
    log.write(FactKey::Delta { cycle, outer, slice: 2 }, delta(2, (3, 4), "merge-0-0"));
    log.write(FactKey::Delta { cycle, outer, slice: 1 }, delta(1, (0, 1), "other"));
    log.write(FactKey::SlicePlan { cycle, outer: 3 }, plan(3, 0));
    log.write(FactKey::Merge { cycle, outer }, merge_fact(1, "merge-0-0", &[]));
    log.write(FactKey::SliceClose { cycle, outer }, close(1));
    log.write(FactKey::SlicePlan { cycle, outer: 2 }, plan(2, 2));
    log.write(FactKey::Merge { cycle, outer: 2 }, merge_fact(2, "x", &["y"]));
    log.write(FactKey::Merge { cycle, outer: u32::MAX }, merge_fact(u32::MAX, "x", &["y"]));
    let found: Vec<_> = log.run().anomalies.into_iter().map(|it| it.description).collect();
    let expected = [
        "its slice was never planned",
        "has 4 steps from 3, the plan 1 from 1",
        "started from other weights than those of the last merge",
        "planned while outer step 0 is the last merged one",
        "merged before it was closed",
        "counts slices without a delta",
        "plans steps that have counted, or twice",
        "merged before it was closed",
        "merged while outer step 2 is the last merged one",
    ];
    assert_eq!(found, expected);
    assert_eq!(log.run().current_phase(), RunPhase::Train);
    log.coordinate();
    assert_eq!(log.run().current_phase(), RunPhase::Done);
}

#[test]
fn a_plan_or_merge_that_contradicts_the_others_ends_the_run() {
    let fail = |steps: usize, key: FactKey, body: FactBody, why: &str| {
        let mut log = start(&["t1", "t2"], ACROSS, 0);
        for _ in 0..steps {
            log.coordinate();
            log.train();
        }
        if steps > 1 {
            log.coordinate();
        }
        log.write(key, body);
        log.coordinate();
        let done = log.run().done.expect("the run waits");
        assert_eq!(done.status(), v1::done::Status::Failed);
        assert!(done.message.contains(why), "{}", done.message);
        assert!(done.message.contains("`flotilla audit r1`"), "{}", done.message);
    };
    let cycle = 0;
    let far = u32::MAX;
    let deltas = ["delta-0-1-1", "delta-0-1-2"];
    let FactBody::Merge(merge) = merge_fact(1, "merge-0-0", &deltas) else { panic!("a merge") };
    let unnamed = FactBody::Merge(v1::Merge { tree: None, ..merge });
    let empty = FactBody::SlicePlan(v1::SlicePlan { outer: 1, ..Default::default() });
    fail(
        2,
        FactKey::Merge { cycle, outer: far },
        merge_fact(far, "x", &["y"]),
        "merge 4294967295: merged while outer step 0 is the last",
    );
    fail(2, FactKey::Merge { cycle, outer: 1 }, unnamed, "merge 1: names no weights");
    let merge_1 = FactKey::Merge { cycle, outer: 1 };
    let other = ["delta-0-1-1", "delta-x"];
    fail(
        2,
        merge_1.clone(),
        merge_fact(1, "merge-0-0", &other),
        "those that count: delta 2 is \"delta-x\", not \"delta-0-1-2\"",
    );
    let fewer = merge_fact(1, "merge-0-0", &deltas[..1]);
    fail(2, merge_1.clone(), fewer, "delta 2 is missing, not \"delta-0-1-2\"");
    fail(2, merge_1, merge_fact(1, "x", &deltas), "the start is \"x\", not \"merge-0-0\"");
    fail(1, FactKey::SlicePlan { cycle, outer: 1 }, empty, "plan 1: plans no slice");
    fail(
        0,
        FactKey::Merge { cycle, outer: 0 },
        merge_fact(0, "", &[]),
        "merge 0: merged without an order",
    );
}

#[test]
fn an_audit_names_a_box_whose_merge_differs_from_the_one_that_counts() {
    let mut log = start(&["t1", "t2"], ACROSS, 0);
    for _ in 0..2 {
        log.coordinate();
        log.train();
    }
    let differs = "merge 1 of cycle 0 has the digest x here and y on t1 (E118)";
    for (attempt, message) in [(1, "the store is down (S101)"), (2, differs)] {
        log.failure(v1::Failure {
            kind: "train".into(),
            id: "0-1-merge".into(),
            attempt,
            agent: "t2".into(),
            message: message.into(),
            ..Default::default()
        });
    }
    log.run_to_the_end();
    let audit = audit_records(log.records()).unwrap();
    assert_eq!(audit.findings, []);
    assert_eq!(audit.caveats, [format!("train 0-1-merge: t2 reports that {differs}")]);
}

#[test]
fn a_merge_that_no_training_needs_does_not_end_the_run() {
    let far = FactKey::Merge { cycle: 0, outer: u32::MAX };
    let mut trained = start(&["t1", "t2"], ACROSS, 0);
    while trained.run().cycles.get(&0).is_none_or(|cycle| cycle.final_checkpoint().is_none()) {
        trained.coordinate();
        trained.train();
    }
    for mut log in [trained, Log::new(sft())] {
        log.write(far.clone(), merge_fact(u32::MAX, "x", &["y"]));
        log.run_to_the_end();
        assert_eq!(log.run().done.unwrap().status(), v1::done::Status::Succeeded);
    }
}

#[test]
fn results_that_contradict_the_plan_never_count_and_end_the_run() {
    let mut log = start(&["t1"], ACROSS, 0);
    for outer in 1..=3 {
        log.coordinate();
        log.train();
        log.coordinate();
        let delta = v1::Delta { run: "r1".into(), outer, slice: 1, ..Default::default() };
        log.write(FactKey::Delta { cycle: 0, outer, slice: 1 }, FactBody::Delta(delta));
        log.coordinate();
        let closed = training(&log, 0).outer_steps[&outer].closed.clone().unwrap();
        assert!(closed.slices.is_empty(), "{closed:?}");
    }
    let done = log.run().done.unwrap();
    assert_eq!(done.status(), v1::done::Status::Failed);
    assert!(done.message.contains("3 outer steps of cycle 0"), "{}", done.message);
    assert_eq!(training(&log, 0).counted_steps(), 0);
}

#[test]
fn a_final_failure_of_a_slice_counts_until_its_outer_step_is_closed() {
    let mut log = start(&["t1", "t2"], ACROSS, 0);
    log.speeds = [("t2".into(), 0.0)].into();
    log.coordinate();
    log.train();
    log.coordinate();
    log.train();
    log.now_ms += 70_000;
    log.coordinate();
    log.coordinate();
    log.fail("train", "0-1-2", "the box is broken");
    log.speeds.clear();
    log.run_to_the_end();
    assert_eq!(log.run().done.unwrap().status(), v1::done::Status::Succeeded);
    let mut log = start(&["t1", "t2"], ACROSS, 0);
    log.coordinate();
    log.train();
    log.coordinate();
    log.fail("train", "0-1-2", "no memory");
    log.coordinate();
    assert_eq!(log.run().done.unwrap().message, "train 0-1-2: no memory");
}

#[test]
fn a_merge_that_was_ordered_after_the_end_counts_for_nothing() {
    let trained = || {
        let mut log = start(&["t1", "t2"], ACROSS, 2);
        for _ in 0..2 {
            log.coordinate();
            log.train();
        }
        log
    };
    let end = |log: &mut Log| {
        log.control(v1::control::Action::Cancel);
        log.coordinate();
        assert!(log.run().done.is_some());
    };
    let counted = |log: &Log| {
        let cycle = log.run().cycles[&0].clone();
        (cycle.split_training.last_merge().unwrap().0, cycle.checkpoints.len(), cycle.evals.len())
    };
    let mut ordered = trained();
    ordered.coordinate();
    let order = ordered.train_orders().last().unwrap().clone();
    end(&mut ordered);
    ordered.train();
    assert_clean(&ordered);
    assert_eq!(counted(&ordered), (1, 1, 0));

    let mut late = trained();
    let (cycle, outer) = (0, 1);
    let close = v1::SliceClose { cycle, outer, slices: vec![1, 2] };
    late.write(FactKey::SliceClose { cycle, outer }, FactBody::SliceClose(close));
    end(&mut late);
    let (pool, part) = ("default".parse().unwrap(), TrainPart::Merge);
    let place = FactKey::TrainPartOrder { pool, cycle, outer, part, attempt: 1 };
    late.write(place, FactBody::TrainOrder(order));
    late.train();
    late.evaluate();
    assert_clean(&late);
    assert_eq!(counted(&late), (0, 0, 0));
}
