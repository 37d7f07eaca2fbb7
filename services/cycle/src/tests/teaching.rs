//! Runs with a teacher, runs without a verifier, and trials of objectives.

use objective::{Objective, ObjectiveName};
use serde_json::Value;
use wire::{FactBody, FactKey, encode_logprobs, v1};

use super::log::Log;
use crate::{Run, RunPhase, audit_records, prepare_trial, preview_selection};

const TEACHER: &str = "b3:teacher";

/// A run that learns from a teacher; without held-out prompts if it has no verifier.
fn taught(cycles: u32, has_verifier: bool) -> Log {
    Log::start_raft(cycles, |raft| {
        let objective = v1::Objective { name: "distillation".into(), ..Default::default() };
        raft.training.as_mut().unwrap().objective = Some(objective);
        raft.token_logprobs = true;
        raft.teacher = Some(v1::Tree { manifest: TEACHER.into(), ..Default::default() });
        if !has_verifier {
            (raft.verifier, raft.heldout, raft.heldout_count) = (None, None, 0);
        }
    })
}

/// Writes the scores of all samples of training; those of index 0 are missing.
fn score(log: &mut Log, teacher: &str) {
    for record in log.records().to_vec() {
        let FactBody::Samples(samples) = &record.fact.body else { continue };
        if samples.purpose() == v1::Purpose::Heldout {
            continue;
        }
        let score = |sample: &v1::samples::Sample| v1::scores::Score {
            token_logprobs: match sample.index {
                0 => Vec::new(),
                _ => encode_logprobs(&[-0.5, -1.5]),
            },
        };
        let body = v1::Scores {
            run: samples.run.clone(),
            cycle: samples.cycle,
            job: samples.job.clone(),
            teacher: teacher.into(),
            samples_sequence: record.sequence,
            scores: samples.samples.iter().map(score).collect(),
            ..Default::default()
        };
        let place = FactKey::Scores { cycle: samples.cycle, job: samples.job.parse().unwrap() };
        log.write(place, FactBody::Scores(body));
    }
}

fn selection(log: &Log) -> (&v1::Selected, Run) {
    let is_selection = |record: &&wire::Record| matches!(record.fact.body, FactBody::Selected(_));
    let place = log.records().iter().position(|record| is_selection(&record)).unwrap();
    let FactBody::Selected(selected) = &log.records()[place].fact.body else { panic!() };
    let mut before = Run::start(&log.records()[0]).unwrap();
    log.records()[1..place].iter().for_each(|record| before.fold_record(record));
    (selected, before)
}

#[test]
fn a_selection_waits_for_the_scores_and_writes_them_into_the_dataset() {
    for has_verifier in [true, false] {
        let mut log = taught(1, has_verifier);
        log.until(RunPhase::Generate);
        log.coordinate();
        log.generate();
        if has_verifier {
            log.verify();
        }
        log.coordinate();
        assert_eq!(log.run().current_phase(), RunPhase::Verify);
        assert!(log.run().cycles[&1].selected.is_none(), "scores are missing");
        score(&mut log, TEACHER);
        log.coordinate();
        let (selected, before) = selection(&log);
        assert_eq!((selected.kept, selected.dropped["not scored"]), (140, 20));
        assert_eq!(selected.prompts.len(), if has_verifier { 20 } else { 0 });
        assert!(selected.diversity > 0.0);
        let dataset = preview_selection(&before, 1, None).unwrap().dataset;
        for line in dataset.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let line: Value = serde_json::from_slice(line).unwrap();
            assert_eq!(line["teacher"], serde_json::json!([-0.5, -1.5]));
        }
        log.train();
        log.evaluate();
        log.coordinate();
        log.generate();
        if has_verifier {
            log.verify();
        }
        log.coordinate();
        assert_eq!(log.run().current_phase(), RunPhase::Done);
        assert_eq!(audit_records(log.records()).unwrap().findings, []);
    }
}

#[test]
fn scores_by_another_model_are_a_contradiction_and_count_as_none() {
    let mut log = taught(1, true);
    log.until(RunPhase::Generate);
    log.coordinate();
    log.generate();
    log.verify();
    score(&mut log, "b3:other");
    log.coordinate();
    let (selected, _) = selection(&log);
    assert_eq!((selected.kept, selected.dropped["not scored"]), (0, 160));
    let described =
        |what: &str| log.run().anomalies.iter().any(|anomaly| anomaly.description.contains(what));
    assert!(described("another model than the spec's teacher"));
}

#[test]
fn what_a_job_does_not_need_changes_nothing() {
    let mut log = taught(1, false);
    log.until(RunPhase::Generate);
    log.coordinate();
    log.generate();
    log.verify();
    assert!(log.run().anomalies[0].description.contains("no verifier"));
    let mut judged = Log::start_raft(1, |_| {});
    judged.until(RunPhase::Generate);
    judged.coordinate();
    judged.generate();
    score(&mut judged, TEACHER);
    assert!(judged.run().anomalies[0].description.contains("without a teacher"));
    judged.run_to_the_end();
}

#[test]
fn a_job_is_set_aside_if_its_scoring_fails() {
    let mut log = taught(1, true);
    log.until(RunPhase::Generate);
    log.coordinate();
    log.generate();
    log.verify();
    let jobs = log.jobs(1, v1::Purpose::Train);
    log.fail("score", &format!("1-{}", jobs[0]), "too large");
    score(&mut log, TEACHER);
    log.coordinate();
    let (selected, _) = selection(&log);
    assert!(selected.dropped["set aside"] > 0);
    assert!(selected.kept > 0);
}

#[test]
fn a_trial_trains_on_the_samples_of_another_run_from_the_same_start() {
    let mut log = Log::start_raft(2, |_| {});
    log.run_to_the_end();
    let place = log.records().iter().position(
        |record| matches!(&record.fact.body, FactBody::Selected(selected) if selected.cycle == 2),
    );
    let mut before = Run::start(&log.records()[0]).unwrap();
    log.records()[1..place.unwrap()].iter().for_each(|record| before.fold_record(record));
    let start = log.run().cycles[&1].final_checkpoint().cloned().unwrap();

    let rloo = Objective::new(ObjectiveName::Rloo);
    let trial = prepare_trial(&before, 2, &rloo).unwrap().unwrap();
    let own = preview_selection(&before, 2, None).unwrap();
    assert!(trial.selection.kept.len() > own.kept.len(), "failures count");
    let dr_grpo = Objective::new(ObjectiveName::DrGrpo);
    let dr_grpo = prepare_trial(&before, 2, &dr_grpo).unwrap().unwrap();
    let Some(v1::spec::Kind::Raft(of_trial)) = &dr_grpo.spec.kind else { panic!("a raft run") };
    let settings = &of_trial.training.as_ref().unwrap().objective.as_ref().unwrap().settings;
    assert_eq!(settings["max_tokens"], 16.0, "as in a spec");
    let mut excluding = Objective::new(ObjectiveName::Dapo);
    excluding.set("truncate_tokens", 2.0).unwrap();
    excluding.set("mask_tokens", 2.0).unwrap();
    assert!(prepare_trial(&before, 2, &excluding).is_err());
    let raft = prepare_trial(&before, 2, &Objective::new(ObjectiveName::Raft)).unwrap().unwrap();
    assert_eq!(raft.selection.dataset, own.dataset);

    // The agents of this test measure perplexities as well.
    let suites = log.run().spec.suites;
    let spec = v1::Spec { run: "r1".into(), name: "trial".into(), suites, ..trial.spec };
    let mut tried = Log::new(spec);
    tried.run_to_the_end();
    assert_eq!(audit_records(tried.records()).unwrap().findings, []);
    let run = tried.run();
    assert_eq!(run.done.as_ref().unwrap().status(), v1::done::Status::Succeeded);
    assert!(run.cycles[&0].jobs.is_empty(), "the start was measured before");
    assert!(tried.generate_orders().all(|order| order.purpose() == v1::Purpose::Heldout));
    let orders: Vec<_> = tried.train_orders().collect();
    assert_eq!(orders[0].adapter, start.tree);
    let digest = wire::Digest::hash_bytes(&trial.selection.dataset).to_string();
    assert_eq!(orders[0].dataset.as_ref().unwrap().digest, digest);
    assert!(run.cycles[&1].done.as_ref().unwrap().heldout.is_some());
}
