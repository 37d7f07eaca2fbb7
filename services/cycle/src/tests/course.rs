//! Runs whose settings change from cycle to cycle, and runs that their metrics stop or roll back.

use std::collections::BTreeSet;

use wire::{
    FactKey, Record, SuiteName,
    v1::{
        self,
        gates::{Gate, Then},
    },
};

use super::log::{Log, raft, sft};
use crate::{Run, RunPhase, audit_records, best_checkpoint, fail_run, newest_checkpoint};

fn gates(then: Then) -> v1::Gates {
    let gate = |suite: &str, margin| Gate { suite: suite.into(), margin, then: then.into() };
    v1::Gates {
        perplexity: vec![gate("text", 0.05)],
        pass_rate: Some(gate("", 0.2)),
        ..Default::default()
    }
}

fn clean(log: &Log) {
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
}

/// The adapter with which each cycle's training samples were ordered.
fn sampled_with(log: &Log, cycle: u32) -> Vec<String> {
    let mut found: Vec<String> = log
        .generate_orders()
        .filter(|order| order.cycle == cycle && order.purpose() == v1::Purpose::Train)
        .map(|order| order.adapter.clone().map_or(String::new(), |tree| tree.manifest))
        .collect();
    found.dedup();
    found
}

#[test]
fn each_cycle_has_its_own_settings_but_held_out_samples_are_drawn_alike() {
    let mut log = Log::start_raft(3, |raft| {
        raft.sampling = Some(v1::Sampling { temperature: 0.8, ..raft.sampling.unwrap() });
        raft.schedules = Some(v1::Schedules {
            temperature: vec![1.0, 0.9],
            learning_rate: vec![4e-4, 2e-4, 1e-4],
            min_reward: vec![0.0, 1.0],
            keep_share: vec![0.5, 0.0],
        });
    });
    log.run_to_the_end();
    let temperatures = |purpose: v1::Purpose| {
        let orders = log.generate_orders().filter(|order| order.purpose() == purpose);
        let mut found: Vec<_> =
            orders.map(|order| (order.cycle, order.sampling.unwrap().temperature)).collect();
        found.dedup();
        found
    };
    assert_eq!(temperatures(v1::Purpose::Train), [(1, 1.0), (2, 0.9), (3, 0.9)]);
    assert_eq!(temperatures(v1::Purpose::Heldout), [(0, 0.8), (1, 0.8), (2, 0.8), (3, 0.8)]);
    let rates: Vec<f64> =
        log.train_orders().map(|order| order.training.as_ref().unwrap().learning_rate).collect();
    assert_eq!(rates, [4e-4, 2e-4, 1e-4]);
    let run = log.run();
    let selected = |cycle: u32| run.cycles[&cycle].selected.as_ref().unwrap();
    let rewards: Vec<f64> = (1..=3).map(|cycle| selected(cycle).min_reward).collect();
    assert_eq!(rewards, [0.0, 1.0, 1.0]);
    assert_eq!((selected(1).kept, selected(2).kept), (10, 20));
    clean(&log);
}

#[test]
fn the_least_reward_follows_the_pass_rate() {
    let mut log = Log::start_raft(3, |raft| {
        let adaptive = v1::selection::Adaptive { target: 0.3, step: 0.25, low: 0.25, high: 0.75 };
        let rules = raft.selection.unwrap();
        raft.selection = Some(v1::Selection { adaptive: Some(adaptive), ..rules });
    });
    // 3 of 8 pass.
    log.nothing_passes_in_cycle(2);
    log.run_to_the_end();
    let run = log.run();
    let rewards: Vec<f64> =
        (1..=3).map(|cycle| run.cycles[&cycle].selected.as_ref().unwrap().min_reward).collect();
    assert_eq!(rewards, [0.5, 0.75, 0.5]);
    clean(&log);
}

#[test]
fn a_run_may_train_each_cycle_from_the_base() {
    let mut log = Log::start_raft(3, |raft| raft.from_base = true);
    log.run_to_the_end();
    assert!(log.train_orders().all(|order| order.adapter.is_none()), "trained on an adapter");
    assert_eq!(sampled_with(&log, 3), ["adapter-2"], "samples are of the newest all the same");
    assert_eq!(log.run().anomalies, []);
    clean(&log);
}

#[test]
fn earlier_winners_are_trained_on_again_where_the_rules_say_so() {
    let mut log = Log::start_raft(4, |raft| {
        let replay = v1::selection::Replay { cycles: 2, share: 0.5 };
        let rules = raft.selection.unwrap();
        raft.selection = Some(v1::Selection { replay: Some(replay), ..rules });
    });
    log.nothing_passes_in_cycle(2);
    log.run_to_the_end();
    let run = log.run();
    let dataset = |cycle: u32| run.cycles[&cycle].selected.as_ref().unwrap().dataset.clone();
    let replays: Vec<_> =
        log.train_orders().map(|order| (order.cycle, order.replay.clone())).collect();
    let of = |cycles: &[u32]| cycles.iter().filter_map(|cycle| dataset(*cycle)).collect();
    assert_eq!(replays, [(1, of(&[])), (3, of(&[1])), (4, of(&[3, 1]))]);
    clean(&log);
}

#[test]
fn with_a_staleness_of_one_the_next_cycle_is_sampled_while_this_one_trains() {
    let mut log = Log::start_raft(3, |raft| raft.staleness = 1);
    log.until(RunPhase::Train);
    assert_eq!(log.run().current_cycle(), 1);
    log.generate();
    assert!(log.run().cycles[&2].has_all_samples(v1::Purpose::Train), "not sampled ahead");
    assert!(log.run().cycles[&2].selected.is_none(), "selected before its turn");
    log.run_to_the_end();
    let used: Vec<_> = (1..=3).flat_map(|cycle| sampled_with(&log, cycle)).collect();
    assert_eq!(used, ["", "", "adapter-1"]);
    let parents: Vec<_> = log
        .train_orders()
        .map(|order| order.adapter.clone().map_or(String::new(), |tree| tree.manifest))
        .collect();
    assert_eq!(parents, ["", "adapter-1", "adapter-2"], "training goes on with the newest");
    assert_eq!(log.run().anomalies, []);
    clean(&log);
}

#[test]
fn a_cycle_that_forgets_is_rolled_back_to_the_best_one() {
    let mut log = Log::start_raft(4, |raft| raft.gates = Some(gates(Then::RollBack)));
    log.perplexities = [(1, 9.0), (2, 9.2), (3, 9.9)].into();
    log.run_to_the_end();
    let run = log.run();
    let done = |cycle: u32| run.cycles[&cycle].done.clone().unwrap();
    assert_eq!(done(2).findings, [], "within the margin");
    let finding = &done(3).findings[0];
    assert_eq!((finding.gate.as_str(), finding.value), ("perplexity of text", 9.9));
    assert_eq!((done(3).then(), done(3).best), (Then::RollBack, 1), "the pass rate never rose");
    assert_eq!(run.parent_checkpoint(4).unwrap().cycle, 1);
    assert_eq!(sampled_with(&log, 4), ["adapter-1"]);
    assert_eq!(run.done.as_ref().unwrap().status(), v1::done::Status::Succeeded);
    clean(&log);
}

#[test]
fn the_best_checkpoint_is_of_the_best_cycle_or_has_the_lowest_perplexity() {
    let mut log = Log::start_raft(4, |raft| raft.gates = Some(gates(Then::RollBack)));
    log.perplexities = [(1, 9.0), (2, 9.2), (3, 9.9)].into();
    log.run_to_the_end();
    let cycles =
        |run: &Run| [best_checkpoint(run), newest_checkpoint(run)].map(|c| c.unwrap().cycle);
    assert_eq!(cycles(&log.run()), [1, 4]);

    let mut run = Log::new(sft()).run();
    assert_eq!(best_checkpoint(&run), None);
    let cycle = run.cycles.entry(0).or_default();
    for step in [10, 20, 30, 40] {
        cycle.checkpoints.insert(step, v1::Checkpoint { step, ..Default::default() });
    }
    assert_eq!(best_checkpoint(&run).unwrap().step, 40, "nothing was measured");
    let suite = |name: &str| SuiteName::new(name).unwrap();
    let measured =
        [(10, "text", 9.0), (20, "text", 8.0), (30, "text", 8.0), (40, "text", f64::NAN)];
    for (step, name, perplexity) in measured.into_iter().chain([(10, "other", 1.0)]) {
        let eval = v1::Eval { perplexity, ..Default::default() };
        run.cycles.entry(0).or_default().evals.insert((step, suite(name)), eval);
    }
    assert_eq!(best_checkpoint(&run).unwrap().step, 20);
    assert_eq!(newest_checkpoint(&run).unwrap().step, 40);
}

#[test]
fn a_run_without_held_out_prompts_goes_by_perplexity() {
    let mut log = Log::start_raft(3, |raft| {
        raft.heldout_count = 0;
        raft.gates = Some(gates(Then::RollBack));
    });
    log.perplexities = [(1, 8.0), (2, 9.0)].into();
    log.run_to_the_end();
    let done = log.run().cycles[&2].done.clone().unwrap();
    assert_eq!((done.then(), done.best), (Then::RollBack, 1));
    assert_eq!(sampled_with(&log, 3), ["adapter-1"]);
    clean(&log);
}

#[test]
fn a_gate_may_end_the_run_with_what_was_best() {
    let mut log = Log::start_raft(4, |raft| {
        raft.gates = Some(gates(Then::Stop));
        raft.staleness = 1;
    });
    log.forgetful = [2].into();
    log.run_to_the_end();
    let done = log.run().done.unwrap();
    assert_eq!(done.status(), v1::done::Status::Succeeded);
    assert_eq!(
        done.message,
        "stopped after cycle 2: its pass rate of 0.0000 is past 0.3000; cycle 0 was the best"
    );
    assert!(!log.run().cycles.contains_key(&4));
    clean(&log);
}

#[test]
fn a_run_that_gets_no_better_ends_when_patience_does() {
    let mut log = Log::start_raft(9, |raft| {
        raft.heldout_count = 0;
        raft.gates = Some(v1::Gates { patience: 2, ..Default::default() });
    });
    log.perplexities = [(1, 9.0), (2, 8.0)].into();
    log.run_to_the_end();
    let run = log.run();
    assert_eq!(run.stopped_after(), Some(4));
    let message = run.done.unwrap().message;
    assert_eq!(message, "stopped after cycle 4: no improvement since cycle 2");
    clean(&log);
}

#[test]
fn what_was_seen_of_prompts_is_known_from_the_log_alone() {
    let mut log = Log::start_raft(2, |raft| raft.prompts_per_cycle = 5);
    log.run_to_the_end();
    let run = log.run();
    assert_eq!(run.prompt_histories.len(), 10, "two cycles of five prompts each");
    assert!(run.prompt_histories.values().all(|seen| (seen.judged, seen.passed) == (8.0, 3.0)));
    let selected = run.cycles[&1].selected.as_ref().unwrap();
    // Three different answers in eight samples.
    assert!((selected.diversity - 3.0 / 8.0).abs() < 1e-12);
}

#[test]
fn the_next_cycle_is_drawn_while_this_one_is_measured() {
    let mut log = Log::start_raft(3, |_| ());
    log.until(RunPhase::Train);
    assert!(sampled_with(&log, 2).is_empty());
    log.train();
    log.coordinate();
    assert_eq!(sampled_with(&log, 2), ["adapter-1"], "not ordered when the adapter was there");
    assert_eq!((log.run().current_cycle(), log.run().current_phase()), (1, RunPhase::Generate));
    // Without evals: the next cycle is drawn, judged and trained, and no further one.
    for _ in 0..5 {
        log.generate();
        log.verify();
        log.train();
        log.coordinate();
    }
    let run = log.run();
    assert!(run.cycles[&1].done.is_none() && run.cycles[&2].final_checkpoint().is_some());
    assert!(run.cycles[&2].done.is_none() && !run.cycles.contains_key(&3), "went too far ahead");
    log.run_to_the_end();
    assert_eq!(log.run().anomalies, []);
    clean(&log);
}

#[test]
fn a_cycle_whose_figures_may_take_its_checkpoint_back_is_waited_for() {
    for (then, waits) in [(Then::Tell, false), (Then::RollBack, true), (Then::Stop, true)] {
        let mut log = Log::start_raft(2, |raft| raft.gates = Some(gates(then)));
        log.until(RunPhase::Train);
        log.train();
        log.coordinate();
        assert_eq!(sampled_with(&log, 2).is_empty(), waits, "{then:?}");
        log.run_to_the_end();
        clean(&log);
    }
}

#[test]
fn a_cycle_that_keeps_nothing_ends_after_the_one_before_it() {
    let mut log = Log::start_raft(3, |_| ());
    log.nothing_passes_in_cycle(2);
    log.until(RunPhase::Train);
    log.train();
    for _ in 0..5 {
        log.coordinate();
        log.generate();
        log.verify();
    }
    let run = log.run();
    assert_eq!(run.cycles[&2].selected.as_ref().map(|selected| selected.kept), Some(0));
    assert!(run.cycles[&2].done.is_none(), "ended before the cycle before it");
    log.run_to_the_end();
    clean(&log);
}

/// Returns the facts of a run that ends before a fact, which was written nevertheless.
fn end_before(log: &Log, is_it: impl Fn(&FactKey) -> bool) -> Vec<Record> {
    let mut records = log.records().to_vec();
    let place = records.iter().position(|record| is_it(&record.fact.subject.key)).unwrap();
    let done = fail_run(&log.run().id, "too hard".into()).fact;
    records.insert(place, Record { fact: done, ..records[place].clone() });
    // From 0, so that the later facts keep the positions that verdicts name.
    (0..).zip(records).map(|(sequence, record)| Record { sequence, ..record }).collect()
}

#[test]
fn work_that_was_ordered_and_done_after_the_end_contradicts_nothing() {
    let mut sampled = Log::new(raft(1));
    sampled.until(RunPhase::Generate);
    sampled.generate();
    sampled.verify();
    let is_order =
        |key: &FactKey| matches!(key, FactKey::GenerateOrder { cycle: 1, attempt: 1, .. });
    let sampled = end_before(&sampled, is_order);
    let mut trained = Log::new(sft());
    trained.coordinate();
    trained.train();
    trained.evaluate();
    let trained = end_before(&trained, |key| matches!(key, FactKey::TrainOrder { .. }));
    for records in [sampled, trained] {
        let report = audit_records(&records).unwrap();
        assert_eq!(report.findings, []);
        let mut run = Run::start(&records[0]).unwrap();
        records.iter().for_each(|record| run.fold_record(record));
        assert!(run.cycles.get(&1).is_none_or(|c| c.jobs.values().all(|j| j.samples.is_none())));
        assert_eq!(run.cycles.get(&0).map_or(0, |cycle| cycle.evals.len()), 0);
    }
}

#[test]
fn results_after_the_end_that_nobody_ordered_are_reported() {
    let mut sampled = Log::new(raft(1));
    sampled.until(RunPhase::Generate);
    sampled.generate();
    sampled.verify();
    let mut trained = Log::new(sft());
    trained.coordinate();
    trained.train();
    trained.evaluate();
    let is_order =
        |key: &FactKey| matches!(key, FactKey::GenerateOrder { .. } | FactKey::TrainOrder { .. });
    for log in [sampled, trained] {
        let mut records = end_before(&log, is_order);
        records.retain(|record| !is_order(&record.fact.subject.key));
        let is_result = |record: &&Record| {
            matches!(
                record.fact.subject.key,
                FactKey::Samples { .. } | FactKey::Checkpoint { step: 1.., .. }
            )
        };
        let results: BTreeSet<u64> =
            records.iter().filter(is_result).map(|record| record.sequence).collect();
        let findings = audit_records(&records).unwrap().findings;
        let found: BTreeSet<u64> = findings.iter().filter_map(|found| found.sequence).collect();
        assert!(!results.is_empty() && results.is_subset(&found), "{findings:?}");
    }
}

#[test]
fn a_result_that_was_ordered_before_the_end_counts_after_it() {
    let mut log = Log::new(sft());
    log.coordinate();
    log.train();
    let records = end_before(&log, |key| matches!(key, FactKey::Checkpoint { .. }));
    assert_eq!(audit_records(&records).unwrap().findings, []);
    let mut run = Run::start(&records[0]).unwrap();
    records.iter().for_each(|record| run.fold_record(record));
    assert!(!run.cycles[&0].checkpoints.is_empty());
}
