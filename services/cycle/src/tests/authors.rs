//! Facts that their author may not write change nothing and are reported.

use std::collections::BTreeMap;

use wire::{AgentId, Fact, FactBody, FactKey, Record, RunId, Subject, v1};

use super::log::{raft, sft, tree, watched};
use crate::{FleetSnapshot, JobSizing, PlannerInputs, ReissueTimeouts, Run, RunSet, audit_records};

fn record(sequence: u64, author: &str, place: FactKey, body: FactBody) -> Record {
    let run = RunId::new("r1").unwrap();
    let fact = Fact { subject: Subject::new(&run, place), body };
    Record { sequence, time_ms: sequence, author: Some(AgentId::new(author).unwrap()), fact }
}

fn checkpoint(base: &str) -> FactBody {
    FactBody::Checkpoint(v1::Checkpoint {
        run: "r1".into(),
        step: 4,
        r#final: true,
        tree: tree(base),
        content: v1::checkpoint::Content::Model.into(),
        ..Default::default()
    })
}

/// Folds a spec by `owner` and then one fact; returns how many checkpoints count and the audit's
/// findings.
fn fold_after(spec: v1::Spec, at: FactKey, fact: Record) -> (usize, Vec<String>) {
    let records = [record(1, "owner", at, FactBody::Spec(spec)), fact];
    let mut run = Run::start(&records[0]).unwrap();
    run.fold_record(&records[1]);
    let count = run.cycles.values().map(|cycle| cycle.checkpoints.len()).sum();
    let findings = audit_records(&records).unwrap().findings;
    (count, findings.into_iter().map(|finding| finding.description).collect())
}

#[test]
fn a_watcher_adds_checkpoints_to_its_own_watched_run_alone() {
    let found = FactKey::WatchedCheckpoint { step: 4 };
    let by = |author: &str| record(2, author, found.clone(), checkpoint("m"));
    let own = fold_after(watched(), FactKey::WatchedSpec, by("owner"));
    assert_eq!(own.0, 1, "{own:?}");
    for (spec, place) in
        [(watched(), FactKey::WatchedSpec), (sft(), FactKey::Spec), (raft(1), FactKey::Spec)]
    {
        let (count, findings) = fold_after(spec, place, by("somebody"));
        assert_eq!(count, 0, "{findings:?}");
        let named = |what: &String| what.contains("watch");
        assert!(findings.iter().any(named), "{findings:?}");
    }
}

#[test]
fn a_trainer_replaces_neither_a_base_nor_what_is_watched() {
    let trained = |cycle| FactKey::Checkpoint { cycle, step: 4 };
    let forged = record(2, "t1", trained(0), checkpoint("another"));
    let (count, findings) = fold_after(raft(1), FactKey::Spec, forged.clone());
    assert_eq!(count, 0);
    assert!(findings.iter().any(|what| what.contains("is its base")), "{findings:?}");
    let (count, findings) = fold_after(watched(), FactKey::WatchedSpec, forged);
    assert_eq!(count, 0);
    assert!(findings.iter().any(|what| what.contains("a trainer's")), "{findings:?}");
}

/// Returns true if the run set ends its only run with the next decision.
fn ends_run(runs: &mut RunSet) -> bool {
    let run = runs.take_dirty().pop().unwrap();
    let (suites, fleet) = (BTreeMap::new(), FleetSnapshot::default());
    let (sizing, timeouts) = (JobSizing::default(), ReissueTimeouts::default());
    let inputs = PlannerInputs {
        prompts: &[],
        heldout: &[],
        suites: &suites,
        fleet: &fleet,
        sizing: &sizing,
        timeouts: &timeouts,
        check_stragglers: false,
        now_ms: 3,
    };
    let written = runs.next_commands(&run, inputs);
    written.iter().any(|command| matches!(command.fact.body, FactBody::Done(_)))
}

/// A run set that has folded the spec of one run.
fn one_run(spec: v1::Spec) -> RunSet {
    let mut runs = RunSet::default();
    runs.fold_record(&record(1, "owner", FactKey::Spec, FactBody::Spec(spec)));
    runs.mark_caught_up();
    runs
}

#[test]
fn what_a_watcher_writes_where_no_run_waits_ends_no_run() {
    let ends = |subject: &str| {
        let mut runs = one_run(sft());
        runs.record_unreadable(2, subject, "garbage");
        ends_run(&mut runs)
    };
    assert!(ends("flotilla.r1.samples.1.j1.g1"), "others wait for what should stand there");
    assert!(ends("flotilla.r1.samples.1.j1"), "in an open fleet too");
    assert!(!ends("flotilla.r1.declined.9.j1.1.g1.g1"), "it only says that somebody waits");
    assert!(!ends("flotilla.r1.watched.w1"));
    assert!(!ends("flotilla.r1.checkpoint.watched.4.w1"));
}

#[test]
fn a_run_whose_place_is_taken_by_a_fact_that_does_not_count_ends() {
    let place = FactKey::Checkpoint { cycle: 0, step: 4 };
    let subject = Subject::new(&RunId::new("r1").unwrap(), place.clone());
    let mut runs = one_run(raft(1));
    runs.fold_record(&record(2, "t1", place, checkpoint("another")));
    assert!(!ends_run(&mut runs));
    runs.record_conflict(&subject, 3);
    assert!(!ends_run(&mut runs), "what was not folded yet may count");
    runs.record_conflict(&subject, 2);
    assert!(ends_run(&mut runs));
}
