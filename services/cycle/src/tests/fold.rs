//! Facts that contradict the state or come too late.

use wire::{Fact, FactBody, Record, v1};

use super::log::{Log, raft};
use crate::{Run, RunPhase};

/// Folds one more fact. Returns the anomaly that it causes.
fn fold(run: &mut Run, subject: &str, body: FactBody) -> Option<String> {
    let subject = format!("flotilla.r1.{subject}").parse().unwrap();
    let (sequence, before) = (run.sequence + 1, run.anomalies.len());
    let fact = Fact { subject, body };
    let record = Record { sequence, time_ms: 100 * sequence, author: None, fact };
    run.fold_record(&record);
    run.fold_record(&record);
    run.anomalies[before..].first().map(|anomaly| {
        assert_eq!((anomaly.sequence, run.anomalies.len()), (sequence, before + 1));
        anomaly.description.clone()
    })
}

fn failure(kind: &str, id: &str, r#final: bool) -> (String, FactBody) {
    let (kind, id) = (kind.to_owned(), id.to_owned());
    let subject = format!("failure.{kind}.{id}.1");
    let message = "why".into();
    let body = v1::Failure { kind, id, r#final, message, ..Default::default() };
    (subject, FactBody::Failure(body))
}

#[test]
fn facts_that_do_not_fit_are_anomalies_and_change_nothing_else() {
    let mut log = Log::new(raft(1));
    log.until(RunPhase::Generate);
    let mut run = log.run();
    let (samples, order) = (v1::Samples::default(), v1::GenerateOrder::default());
    let job = run.cycles[&1].jobs.keys().next().unwrap().clone();
    let of_job = format!("verdicts.1.{job}");
    let cases = [
        ("spec", FactBody::Spec(raft(1)), "a second spec"),
        ("control.1", FactBody::Control(<_>::default()), "a control without an action"),
        ("done", FactBody::Plan(<_>::default()), "the message does not belong under this subject"),
        ("samples.9.x", FactBody::Samples(samples.clone()), "cycle 9 was never planned"),
        ("samples.1.x", FactBody::Samples(samples), "job x is not in the plan of cycle 1"),
        (
            "order.generate.default.1.x.1",
            FactBody::GenerateOrder(order),
            "job x is not in the plan of cycle 1",
        ),
        (&of_job, FactBody::Verdicts(<_>::default()), "verdicts before any samples"),
        ("eval.0.7.text", FactBody::Eval(<_>::default()), "an eval before its checkpoint"),
        ("cycle.9.done", FactBody::CycleDone(<_>::default()), "cycle 9 was never planned"),
        ("cycle.1.archived", FactBody::Archived(<_>::default()), "archived before it was done"),
        (
            "checkpoint.0.3",
            FactBody::Checkpoint(<_>::default()),
            "cycle 0 of a RAFT run is its base, and this is another model",
        ),
    ];
    for (subject, body, what) in cases {
        assert_eq!(fold(&mut run, subject, body).as_deref(), Some(what), "{subject}");
    }
    assert_eq!((run.last_control, run.current_phase()), (1, RunPhase::Generate));
}

#[test]
fn a_final_failure_gives_up_only_what_has_no_result_yet() {
    let mut log = Log::new(raft(1));
    log.until(RunPhase::Generate);
    let jobs = log.jobs(1, v1::Purpose::Train);
    let aside = |run: &Run| -> Vec<String> {
        let jobs = run.cycles[&1].jobs.iter().filter(|(_, job)| job.set_aside.is_some());
        jobs.map(|(id, _)| id.to_string()).collect()
    };
    let fail = |run: &mut Run, kind: &str, id: &str, r#final| {
        let (subject, body) = failure(kind, id, r#final);
        fold(run, &subject, body)
    };
    let id = |job: &str| format!("1-{job}");
    let (mut run, first) = (log.run(), id(&jobs[0]));
    fail(&mut run, "generate", &first, false);
    fail(&mut run, "verify", &first, true);
    fail(&mut run, "generate", "1-unplanned", true);
    fail(&mut run, "generate", "9-t1", true);
    fail(&mut run, "train", &first, false);
    assert_eq!((aside(&run), run.failures.len()), (vec![], 5));
    fail(&mut run, "generate", &first, true);
    assert_eq!(aside(&run), [jobs[0].clone()]);
    let why = run.cycles[&1].jobs[&jobs[0].parse().unwrap()].set_aside.clone();
    assert_eq!(why, Some(format!("generate {first}: why")));

    log.generate();
    let mut run = log.run();
    fail(&mut run, "generate", &first, true);
    assert_eq!(aside(&run), Vec::<String>::new());
    fail(&mut run, "verify", &first, true);
    assert_eq!(aside(&run), [jobs[0].clone()]);
    log.verify();
    let mut run = log.run();
    fail(&mut run, "verify", &first, true);
    assert_eq!(aside(&run), Vec::<String>::new());

    let suites = [v1::Suite { name: "text".into(), ..Default::default() }];
    let mut run = log.run();
    run.cycles.get_mut(&0).unwrap().evals.clear();
    for (id, r#final, complete) in
        [("0-0-text", false, false), ("0-9-text", true, false), ("0-0-text", true, true)]
    {
        fail(&mut run, "eval", id, r#final);
        assert_eq!(run.cycles[&0].has_all_evals(&suites), complete, "{id}");
    }
}

#[test]
fn results_that_come_too_late_change_nothing() {
    let mut log = Log::new(raft(1));
    log.run_to_the_end();
    let mut run = log.run();
    let at = run.sequence;
    assert_eq!(run.ended_ms, Some(100 * at));
    let again = |run: &mut Run, subject: &str| {
        let record = log.records().iter().find(|record| {
            record.fact.subject.to_string().starts_with(&format!("flotilla.r1.{subject}"))
        });
        let fact = record.unwrap().fact.clone();
        let subject = fact.subject.to_string().replace("flotilla.r1.", "");
        fold(run, &subject, fact.body)
    };
    let (votes, times) = (run.cycles[&1].train_orders, run.cycles[&1].times.clone());
    for subject in ["cycle.1.plan", "order.generate", "order.train", "samples.1", "verdicts.1"] {
        assert_eq!(again(&mut run, subject), None, "{subject}");
    }
    assert_eq!(run.cycles[&1].train_orders, votes);
    assert_eq!(format!("{:?}", run.cycles[&1].times), format!("{times:?}"));
    fold(&mut run, "cycle.1.archived", FactBody::Archived(<_>::default()));
    let cycle = &run.cycles[&1];
    assert!(cycle.archived.is_some() && cycle.jobs.is_empty() && cycle.plan.is_none());
    for subject in ["samples.1", "verdicts.1"] {
        assert_eq!(again(&mut run, subject), None, "{subject}");
    }
}

#[test]
fn a_flood_of_failures_keeps_the_last_ones_and_cuts_their_texts() {
    let mut log = Log::new(raft(1));
    log.until(RunPhase::Generate);
    let mut run = log.run();
    for number in 0..1100 {
        let (subject, FactBody::Failure(body)) = failure("generate", &format!("j{number}"), false)
        else {
            panic!("a failure");
        };
        let message = "ö".repeat(5000);
        let (log_tail, agents) = ("x".repeat(1 << 20), vec!["a".repeat(100); 100]);
        let body = v1::Failure { message, log_tail, agents, ..body };
        assert_eq!(fold(&mut run, &subject, FactBody::Failure(body)), None);
    }
    assert_eq!(run.failures.len(), 1000);
    let (first, last) = (&run.failures[0], &run.failures[999]);
    assert_eq!((first.id.as_str(), last.id.as_str()), ("j100", "j1099"));
    assert_eq!((last.message.len(), last.log_tail.len()), (4096, 4096));
    assert!(last.agents.len() == 64 && last.agents.iter().all(|agent| agent.len() == 64));
}

#[test]
fn the_reason_of_work_that_is_given_up_fits_into_the_last_fact() {
    let mut log = Log::new(raft(1));
    log.until(RunPhase::Generate);
    let job = log.jobs(1, v1::Purpose::Train).remove(0);
    log.fail("generate", &format!("1-{job}"), &"x".repeat(1 << 20));
    log.fail("train", "1", &"x".repeat(1 << 20));
    let aside = log.run().cycles[&1].jobs[&job.parse().unwrap()].set_aside.clone().unwrap();
    assert!(aside.len() < 8192, "{} bytes", aside.len());
    log.coordinate();
    let done = log.run().done.unwrap();
    assert!(done.message.starts_with("train 1: x") && done.message.len() < 8192);
}
