//! Runs that take over the first cycles of another one.

use wire::{FactBody, FactKey, Record, v1};

use super::log::{Log, raft, sft, tree};
use crate::{audit_records, check_fork, fork_after};

/// Starts a fork of a run after a cycle, with a changed spec.
fn fork(parent: &Log, cycle: u32, change: impl FnOnce(&mut v1::spec::Raft)) -> Log {
    let mut spec = parent.run().spec;
    spec.fork = fork_after(parent.records(), cycle);
    assert!(spec.fork.is_some(), "cycle {cycle} cannot be forked");
    let Some(v1::spec::Kind::Raft(raft)) = &mut spec.kind else { panic!("a raft run") };
    change(raft);
    Log::new(spec)
}

/// A run whose prompts and least reward depend on earlier cycles.
fn finished_parent() -> Log {
    let mut log = Log::start_raft(4, |raft| {
        let adaptive = v1::selection::Adaptive { target: 0.3, step: 0.25, low: 0.25, high: 0.75 };
        let replay = v1::selection::Replay { cycles: 2, share: 0.5 };
        let rules = raft.selection.unwrap();
        raft.selection =
            Some(v1::Selection { adaptive: Some(adaptive), replay: Some(replay), ..rules });
        raft.prompts_per_cycle = 5;
        let difficulty = v1::curriculum::Difficulty { target: vec![0.4], explore: 0.2 };
        raft.curriculum = Some(v1::Curriculum { difficulty: Some(difficulty), budget: None });
    });
    log.perplexities = [(1, 9.0), (2, 9.5), (3, 8.0)].into();
    log.run_to_the_end();
    log
}

fn assert_clean(log: &Log) {
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
    assert_eq!(log.run().anomalies, []);
    let done = log.run().done.unwrap();
    assert_eq!(done.status(), v1::done::Status::Succeeded, "{}", done.message);
}

fn plans(log: &Log) -> Vec<v1::Plan> {
    let plan = |record: &Record| match &record.fact.body {
        FactBody::Plan(plan) if plan.cycle > 2 => Some(plan.clone()),
        _ => None,
    };
    log.records().iter().filter_map(plan).collect()
}

#[test]
fn a_fork_without_changes_ends_as_the_run_did() {
    let parent = finished_parent();
    for cycle in 0..4 {
        let mut forked = fork(&parent, cycle, |_| ());
        forked.perplexities.clone_from(&parent.perplexities);
        forked.run_to_the_end();
        assert_clean(&forked);
        let first = forked.records().iter().find_map(|it| it.fact.subject.key.cycle_number());
        assert_eq!(first, Some(cycle + 1), "an earlier cycle is in its log");
        let (ours, theirs) = (forked.run(), parent.run());
        assert_eq!(ours.cycles.len(), theirs.cycles.len());
        for (number, then) in &theirs.cycles {
            let now = &ours.cycles[number];
            assert_eq!(now.checkpoints, then.checkpoints, "cycle {number}");
            assert_eq!(now.evals, then.evals, "cycle {number}");
            let kept = |cycle: &crate::Cycle| cycle.selected.clone().map(|it| it.dataset);
            assert_eq!(kept(now), kept(then), "cycle {number}");
            let best = |cycle: &crate::Cycle| cycle.done.clone().map(|it| (it.best, it.heldout));
            assert_eq!(best(now), best(then), "cycle {number}");
        }
        assert_eq!(ours.prompt_histories, theirs.prompt_histories);
        assert_eq!(
            forked.train_orders().collect::<Vec<_>>(),
            parent.train_orders().filter(|order| order.cycle > cycle).collect::<Vec<_>>()
        );
        if cycle == 2 {
            assert_eq!(plans(&forked), plans(&parent));
        }
    }
}

/// Returns what a fork takes over, without the time that phases took.
fn taken_over(log: &Log, cycle: u32) -> v1::spec::Fork {
    let mut fork = fork_after(log.records(), cycle).expect("it can be forked");
    for done in fork.cycles.iter_mut().filter_map(|cycle| cycle.done.as_mut()) {
        (done.generate_s, done.verify_s, done.train_s, done.eval_s) = (0.0, 0.0, 0.0, 0.0);
    }
    fork
}

#[test]
fn a_fork_of_a_fork_takes_over_the_cycles_of_both() {
    let parent = finished_parent();
    let mut forked = fork(&parent, 1, |raft| raft.cycles = 6);
    forked.perplexities.clone_from(&parent.perplexities);
    forked.run_to_the_end();
    assert_clean(&forked);
    assert_eq!(fork_after(forked.records(), 1), None, "cycle 1 is not its own");
    assert_eq!(taken_over(&forked, 3), taken_over(&parent, 3));
    let mut last = fork(&forked, 5, |_| ());
    last.run_to_the_end();
    assert_clean(&last);
    assert_eq!(last.run().last_cycle(), 6);
}

#[test]
fn only_done_cycles_of_raft_runs_can_be_forked() {
    let mut open = Log::new(raft(2));
    open.coordinate();
    assert_eq!(fork_after(open.records(), 0), None, "not done");
    let parent = finished_parent();
    assert_eq!(fork_after(parent.records(), 5), None, "there is no such cycle");
    let mut other = Log::new(sft());
    other.run_to_the_end();
    assert_eq!(fork_after(other.records(), 0), None, "no raft run");
}

#[test]
fn a_gate_that_stopped_a_run_does_not_stop_its_fork() {
    let gate =
        v1::gates::Gate { suite: "text".into(), margin: 0.05, then: v1::gates::Then::Stop.into() };
    let gates = v1::Gates { perplexity: vec![gate], ..Default::default() };
    let mut parent = Log::start_raft(3, |raft| raft.gates = Some(gates));
    parent.perplexities = [(1, 9.0), (2, 99.0)].into();
    parent.run_to_the_end();
    assert_eq!(parent.run().stopped_after(), Some(2));
    let mut forked = fork(&parent, 2, |raft| raft.gates = None);
    forked.run_to_the_end();
    assert_clean(&forked);
    assert!(forked.run().cycles[&3].done.is_some());
}

#[test]
fn what_is_taken_over_must_be_what_the_run_did() {
    let parent = finished_parent();
    let right = fork_after(parent.records(), 2).unwrap();
    assert_eq!(check_fork(&right, parent.records()), None);
    let mut early = right.clone();
    early.cycles[2].evals.clear();
    assert_eq!(check_fork(&early, parent.records()), None, "evals may come later");
    let mut wrong = right.clone();
    wrong.cycles[1].checkpoints[0].tree = tree("another");
    let found = check_fork(&wrong, parent.records()).unwrap();
    assert_eq!(found, "its cycles 0 to 2 are not those of run r1");
    let found = check_fork(&v1::spec::Fork { cycle: 9, ..right }, parent.records()).unwrap();
    assert_eq!(found, "run r1 has no done cycle 9 of its own");
}

#[test]
fn facts_of_cycles_that_were_taken_over_do_not_count() {
    let parent = finished_parent();
    let mut forked = fork(&parent, 2, |_| ());
    let other = v1::Checkpoint { cycle: 1, step: 20, tree: tree("another"), ..Default::default() };
    forked.write(FactKey::Checkpoint { cycle: 1, step: 20 }, FactBody::Checkpoint(other));
    let run = forked.run();
    assert_eq!(run.cycles[&1].checkpoints, parent.run().cycles[&1].checkpoints);
    assert_eq!(run.anomalies[0].description, "cycle 1 is that of the run that the spec forks");
}
