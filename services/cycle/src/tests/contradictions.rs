//! One change of one fact of a clean log: the audit names the fact and the reason.

use wire::{FactBody, FactKey, Record, v1};

use super::{
    log::{Log, raft, sft, watched},
    tampered::{audit, drop_fact, position},
};

/// The subject of a fact (its beginning is enough), a change of it, and a part of the finding.
type Change = (&'static str, fn(&mut FactBody), &'static str);

/// Lists changes as `subject Kind { change => finding, … }`.
macro_rules! changes {
    ($($subject:literal $kind:ident { $($change:expr => $what:literal,)* })*) => {
        vec![$($(change(
            $subject,
            |body| {
                let FactBody::$kind(body) = body else { panic!("{} has another body", $subject) };
                let change: fn(&mut v1::$kind) = $change;
                change(body);
            },
            $what,
        )),*),*]
    };
}

fn change(subject: &'static str, change: fn(&mut FactBody), what: &'static str) -> Change {
    (subject, change, what)
}

fn is_reported(clean: &[Record], (subject, change, what): &Change) -> bool {
    let mut records = clean.to_vec();
    let at = position(&records, &format!("flotilla.r1.{subject}"));
    change(&mut records[at].fact.body);
    assert_ne!(records[at], clean[at], "{subject}: {what}: nothing was changed");
    let sequence = Some(records[at].sequence);
    let findings = audit(&records).findings;
    findings.iter().any(|found| found.sequence == sequence && found.description.contains(what))
}

fn check_changes(log: &Log, changes: &[Change]) {
    assert_eq!(audit(log.records()).findings, []);
    let missed = changes.iter().filter(|change| !is_reported(log.records(), change));
    let missed: Vec<_> = missed.map(|(subject, _, what)| (subject, what)).collect();
    assert!(missed.is_empty(), "{missed:#?}");
}

fn raft_log() -> Log {
    let mut log = Log::new(raft(1));
    log.coordinate();
    log.failure(v1::Failure {
        kind: "eval".into(),
        id: "0-0-text".into(),
        attempt: 1,
        ..Default::default()
    });
    log.run_to_the_end();
    log
}

#[test]
fn orders_follow_from_the_spec_the_plan_and_the_policy() {
    let changes = changes! {
        "order.generate.default.1.t" GenerateOrder {
            |order| (order.run, order.cycle, order.job, order.attempt) = <_>::default()
                => "its run, its cycle, its job, its attempt is not its subject's",
            |order| order.purpose = v1::Purpose::Heldout.into() => "its purpose is not its job's",
            |order| order.suite.push('x') => "its suite is not its job's",
            |order| order.base = None => "orders samples of another policy",
            |order| order.adapter = order.base.clone() => "orders samples of another policy",
            |order| order.sampling = None => "its sampling is not the spec's",
            |order| order.accept_unverified_policy = true
                => "its requirement of a verified policy differs from the spec",
            |order| order.logprobs = true => "its request for log-probs differs from the spec",
            |order| order.seed += 1 => "its seed does not follow from the run's",
            |order| order.round = 2 => "ordered in round 2, but the run was resumed 0 times",
            |order| order.canary.push('x') => "its canary is not that of its policy",
            |order| order.requests.clear() => "0 requests for ",
            |order| order.requests[0].first += 1 => "differs from the plan",
            |order| order.requests[0].count += 1 => "differs from the plan",
            |order| order.requests[0].prompt_id.push('x') => "is not line",
        }
        "order.train.default.1" TrainOrder {
            |order| (order.run, order.cycle, order.attempt) = <_>::default()
                => "its run, its cycle, its attempt is not its subject's",
            |order| order.dataset = None => "its dataset is not what was selected",
            |order| order.training = None => "its training is not the spec's",
            |order| order.replay.push(v1::Blob::default()) => "it replays samples",
            |order| order.replay_share = 0.5 => "it replays samples",
            |order| order.canary.push('x') => "its canary is not of what was selected",
            |order| order.base = None => "trains another model than the one the cycle continues",
            |order| order.adapter = Some(v1::Tree::default())
                => "trains another model than the one the cycle continues",
            |order| order.seed += 1 => "its seed does not follow from the run's",
            |order| order.round = 2 => "ordered in round 2, but the run was resumed 0 times",
        }
    };
    check_changes(&raft_log(), &changes);
}

#[test]
fn a_plan_draws_each_prompt_of_the_spec_for_its_purpose() {
    let changes = changes! {
        "cycle.0.plan" Plan {
            |plan| plan.cycle = 9 => "its cycle is not its subject's",
            |plan| plan.jobs.push(extra_job()) => "draws from 1 train prompts, but there are 0",
            |plan| plan.jobs.push(extra_job()) => "3 train samples are planned, but not to be",
            |plan| plan.jobs[0].draws[0].count += 1
                => "1 heldout samples are planned, but not to be drawn, the first of them sample 2",
            |plan| { plan.jobs[0].draws.remove(0); }
                => "draws from 9 heldout prompts, but there are 10",
        }
        "cycle.1.plan" Plan {
            |plan| plan.jobs[1].job = plan.jobs[0].job.clone() => "is planned twice",
            |plan| plan.jobs[0].job = "a b".into() => "\"a b\"",
            |plan| plan.jobs[0].purpose = 0 => "has no purpose",
            |plan| plan.jobs[0].suite = "math".into()
                => "draws from suite \"math\", which the spec does not have",
            |plan| plan.jobs[0].draws[0].first += 1
                => "1 train samples are not planned, the first of them sample 0",
            |plan| plan.jobs[0].draws[0].first += 1
                => "1 train samples are planned, but not to be drawn, the first of them sample 8",
            |plan| plan.jobs[0].draws[0].count += 2
                => "2 train samples are planned, but not to be drawn, the first of them sample 8",
            |plan| { let draw = plan.jobs[0].draws[0]; plan.jobs[0].draws.push(draw) }
                => "8 train samples are planned twice, the first of them sample 0",
        }
    };
    check_changes(&raft_log(), &changes);
}

fn extra_job() -> v1::plan::Job {
    v1::plan::Job {
        job: "x".into(),
        purpose: v1::Purpose::Train.into(),
        draws: vec![v1::plan::Draw { prompt: 0, first: 0, count: 3 }],
        ..Default::default()
    }
}

#[test]
fn results_belong_to_what_was_ordered() {
    let changes = changes! {
        "samples.1.t" Samples {
            |samples| (samples.run, samples.cycle, samples.job) = <_>::default()
                => "its run, its cycle, its job is not its subject's",
            |samples| samples.attempt = 9 => "attempt 9 of its job was never ordered",
            |samples| samples.purpose = 0 => "its purpose is not its job's",
            |samples| samples.suite.push('x') => "its suite is not its job's",
            |samples| samples.adapter.push('x') => "made by another policy",
            |samples| samples.base.push('x') => "made by another policy",
            |samples| samples.caveat.push('x') => "the spec does not accept that x",
            |samples| samples.samples[1].tokens = 17 => "has 17 tokens, the limit was 16",
        }
        "verdicts.1.t" Verdicts {
            |verdicts| (verdicts.run, verdicts.cycle, verdicts.job) = <_>::default()
                => "its run, its cycle, its job is not its subject's",
            |verdicts| verdicts.purpose = 0 => "its purpose is not its job's",
            |verdicts| verdicts.suite.push('x') => "its suite is not its job's",
            |verdicts| verdicts.samples_sequence = 1 => "judges samples 1",
            |verdicts| verdicts.verdicts[0].index = 99 => "does not judge each sample of its job",
            |verdicts| verdicts.verdicts.push(verdicts.verdicts[0].clone())
                => "does not judge each sample of its job once",
            |verdicts| verdicts.verdicts[0].outcome = 0 => "has a reward of 0, which is not its",
            |verdicts| verdicts.verdicts[1].reward = 0.0 => "has a reward of 0, which is not its",
        }
        "selection.1" Selected {
            |selected| selected.cycle = 9 => "its cycle is not its subject's",
        }
        "checkpoint.0.0" Checkpoint {
            |base| base.content = v1::checkpoint::Content::Adapter.into()
                => "it is not the spec's base",
            |base| base.r#final = false => "it is not the spec's base",
        }
        "checkpoint.1.10" Checkpoint {
            |point| (point.run, point.cycle, point.step) = <_>::default()
                => "its run, its cycle, its step is not its subject's",
            |point| point.r#final = false => "its step, steps and final contradict",
            |point| point.steps = 11 => "its step, steps and final contradict",
            |point| (point.steps, point.r#final) = (9, false)
                => "its step, steps and final contradict",
            |point| point.tree = None => "it names no tree",
            |point| point.content = 0 => "it does not state its contents",
            |point| point.content = v1::checkpoint::Content::Model.into()
                => "it is a model, not the adapter asked for",
        }
        "eval.1.10.text" Eval {
            |eval| (eval.run, eval.cycle, eval.step, eval.suite) = <_>::default()
                => "its run, its cycle, its step, its suite is not its subject's",
        }
        "failure.eval.0-0-text" Failure {
            |failure| (failure.run, failure.kind, failure.id) = <_>::default()
                => "its run, its kind, its id is not its subject's",
        }
    };
    check_changes(&raft_log(), &changes);
}

#[test]
fn conclusions_follow_from_the_results() {
    let mut log = raft_log();
    log.archive(0);
    let changes = changes! {
        "cycle.1.done" CycleDone {
            |done| done.cycle = 9 => "its cycle is not its subject's",
            |done| done.sampled += 1 => "its counts do not follow",
            |done| done.kept += 1 => "its counts do not follow",
            |done| done.set_aside += 1 => "its counts do not follow",
            |done| done.heldout = None => "its counts do not follow",
            |done| done.train = None => "its counts do not follow",
            |done| done.pass_at.push(<_>::default()) => "its counts do not follow",
            |done| done.suites.push(<_>::default()) => "its counts do not follow",
            |done| done.samples_by_agent.clear() => "its counts do not follow",
            |done| done.findings.push(<_>::default()) => "its counts do not follow",
            |done| done.best += 1 => "its counts do not follow",
            |done| done.then = 1 => "its counts do not follow",
        }
        "cycle.0.archived" Archived {
            |archived| archived.cycle = 9 => "its cycle is not its subject's",
        }
        "done" Done {
            |done| done.status = 0 => "the run's facts do not show that it status_unspecified",
            |done| done.status = v1::done::Status::Failed.into()
                => "the run's facts do not show that it failed",
            |done| done.status = v1::done::Status::Cancelled.into()
                => "the run's facts do not show that it cancelled",
        }
    };
    check_changes(&log, &changes);
    let done = changes! {
        "done" Done { |done| (done.status, done.message) = (2, "why".into()) => "do not show", }
    };
    assert!(!is_reported(log.records(), &done[0]), "a failure has a reason");
}

#[test]
fn runs_without_samples_follow_from_their_specs() {
    let changes = changes! {
        "order.train.default.0" TrainOrder {
            |order| order.training = Some(<_>::default()) => "its training is not the spec's",
            |order| order.base = None => "trains another model than the spec's base",
            |order| order.adapter = Some(<_>::default())
                => "trains another model than the spec's base",
            |order| order.seed += 1 => "its seed does not follow from the run's",
        }
        "checkpoint.0.10" Checkpoint {
            |point| point.content = v1::checkpoint::Content::Adapter.into()
                => "it is an adapter, but every weight was to be trained",
        }
    };
    let mut log = Log::new(sft());
    log.run_to_the_end();
    check_changes(&log, &changes);

    let changes = changes! {
        "checkpoint.watched.10" Checkpoint {
            |point| (point.run, point.cycle, point.step) = <_>::default()
                => "its run, its step is not its subject's",
            |point| (point.cycle, point.step) = (1, 9) => "its cycle, its step is not its subject's",
            |point| point.steps = 10 => "its step, steps and final contradict",
            |point| point.steps = 9 => "its step, steps and final contradict",
            |point| point.content = 0 => "it does not state its contents",
            |point| point.content = v1::checkpoint::Content::Model.into()
                => "its base is not the spec's",
        }
        "checkpoint.watched.30" Checkpoint {
            |point| point.steps = 31 => "its step, steps and final contradict",
        }
    };
    let mut log = Log::new(watched());
    log.find_checkpoint(10);
    log.find_checkpoint(30);
    log.run_to_the_end();
    check_changes(&log, &changes);
    let unknown = changes! {
        "checkpoint.watched.10" Checkpoint { |point| point.steps = 0 => "contradict", }
    };
    assert!(!is_reported(log.records(), &unknown[0]), "the number of steps may be unknown");
}

#[test]
fn an_eval_is_of_a_suite_and_its_perplexity_follows_from_its_mean() {
    let log = raft_log();
    let eval = |tokens, mean_nll: f64, factor: f64| {
        let mut records = log.records().to_vec();
        let at = position(&records, "flotilla.r1.eval.1.10.text");
        let FactBody::Eval(eval) = &mut records[at].fact.body else { panic!("an eval") };
        (eval.tokens, eval.mean_nll, eval.perplexity) = (tokens, mean_nll, mean_nll.exp() * factor);
        let wrong = |what: &str| what == "its perplexity does not follow from its mean_nll";
        audit(&records).findings.iter().any(|found| wrong(&found.description))
    };
    assert!(!eval(9, 2.0, 1.0) && !eval(9, 2.0, 1.0 + 9e-7) && !eval(9, 2.0, 1.0 - 9e-7));
    assert!(eval(9, 2.0, 1.0 + 2e-6) && eval(9, 2.0, 1.0 - 2e-6) && eval(1, 2.0, 2.0));
    assert!(!eval(0, 2.0, 2.0), "nothing was measured");

    let mut log = raft_log();
    log.evaluate_suite("other");
    let findings = audit(log.records()).findings;
    assert_eq!(findings.len(), 2, "one for each checkpoint: {findings:#?}");
    assert_eq!(findings[0].description, "the spec asks for no eval other");
}

#[test]
fn partial_rewards_are_for_verifiers_that_may_give_them() {
    use v1::verifier::{How, *};
    let (partial, limits) = (true, None);
    let cases = [
        (How::Exact(Exact::default()), false),
        (How::Numeric(Numeric::default()), false),
        (How::Python(Python::default()), false),
        (How::Python(Python { partial, limits, ..Default::default() }), true),
        (How::ToolCall(ToolCall { partial, ..Default::default() }), true),
        (How::ToolCall(ToolCall::default()), false),
        (How::Command(Command::default()), true),
        (How::Http(Http::default()), true),
    ];
    for (how, is_allowed) in cases {
        let log = raft_log();
        let name = format!("{how:?}");
        let verdict = |reward: f64, outcome: v1::verdicts::Outcome, log: &Log| {
            let mut records = log.records().to_vec();
            let FactBody::Spec(v1::Spec { kind: Some(v1::spec::Kind::Raft(raft)), .. }) =
                &mut records[0].fact.body
            else {
                panic!("a raft run")
            };
            raft.verifier = Some(v1::Verifier { how: Some(how.clone()) });
            let at = position(&records, "flotilla.r1.verdicts.1.t");
            let FactBody::Verdicts(verdicts) = &mut records[at].fact.body else { panic!() };
            (verdicts.verdicts[0].reward, verdicts.verdicts[0].outcome) = (reward, outcome.into());
            let findings = audit(&records).findings;
            findings.iter().all(|found| !found.description.contains("is not its outcome's"))
        };
        use v1::verdicts::Outcome;
        assert_eq!(verdict(0.75, Outcome::Pass, &log), is_allowed, "{name}");
        assert!(!verdict(f64::NAN, Outcome::Pass, &log), "{name}");
        assert!(!verdict(0.75, Outcome::Error, &log), "{name}");
        assert!(verdict(0.0, Outcome::Error, &log), "{name}");
    }
}

#[test]
fn facts_of_what_was_never_decided_are_contradictions() {
    let clean = raft_log();
    let without = |dropped: &str, subject: &str, what: &str| {
        let mut records = clean.records().to_vec();
        drop_fact(&mut records, &format!("flotilla.r1.{dropped}"));
        let findings = audit(&records).findings;
        let found = findings.iter().any(|finding| {
            let place = finding.subject.as_deref().unwrap_or_default();
            place.starts_with(&format!("flotilla.r1.{subject}")) && finding.description == what
        });
        assert!(found, "{dropped}: {findings:#?}");
    };
    without("selection.1", "order.train.default.1", "ordered before anything was selected");
    without("cycle.1.plan", "order.generate.default.1", "ordered before anything was planned");
    let mut records = clean.records().to_vec();
    records.swap(0, 1);
    assert_eq!(audit(&records).findings[0].description, "stands before the run's spec");
    let mut records = clean.records().to_vec();
    let FactBody::Selected(selected) =
        &mut records[position(clean.records(), "flotilla.r1.selection.1")].fact.body
    else {
        panic!("a selection")
    };
    selected.kept = 0;
    let findings = audit(&records).findings;
    let nothing =
        |found: &crate::LogContradiction| found.description == "orders training on nothing";
    assert!(findings.iter().any(nothing), "{findings:#?}");
    let mut log = Log::new(watched());
    let order = v1::TrainOrder { run: "r1".into(), attempt: 1, ..Default::default() };
    let place = FactKey::TrainOrder { pool: "default".parse().unwrap(), cycle: 0, attempt: 1 };
    log.write(place, FactBody::TrainOrder(order));
    assert_eq!(audit(log.records()).findings[0].description, "a watched run orders nothing");
}

#[test]
fn a_run_that_succeeded_lacks_no_result() {
    let clean = raft_log();
    let lacks = |dropped: &[&str]| {
        let is_dropped = |record: &&Record| {
            let subject = record.fact.subject.to_string();
            !dropped.iter().any(|begin| subject.starts_with(&format!("flotilla.r1.{begin}")))
        };
        let records: Vec<Record> = clean.records().iter().filter(is_dropped).cloned().collect();
        let findings = audit(&records).findings.into_iter();
        findings.filter(|found| found.sequence.is_none()).map(|found| found.description).collect()
    };
    let none: Vec<String> = lacks(&[]);
    assert_eq!(none, Vec::<String>::new());
    let job = clean.jobs(1, v1::Purpose::Train)[0].clone();
    let (samples, verdicts) = (format!("samples.1.{job}"), format!("verdicts.1.{job}"));
    let (unsampled, unverified) = (
        format!("cycle 1, job {job}: planned but never sampled"),
        format!("cycle 1, job {job}: never verified"),
    );
    assert_eq!(lacks(&[&samples, &verdicts]), [unsampled, unverified.clone()]);
    assert_eq!(lacks(&[&verdicts]), [unverified]);
    assert_eq!(lacks(&["eval.1"]), ["cycle 1: a checkpoint was never evaluated"]);
    let untrained: Vec<String> = lacks(&["checkpoint.1", "eval.1"]);
    assert_eq!(untrained, ["cycle 1: 20 samples selected, never trained on"]);
}

#[test]
fn archived_cycles_are_counted_and_unreadable_ones_are_not_judged() {
    let mut log = raft_log();
    let before = audit(log.records());
    log.archive(0);
    log.archive(1);
    let after = audit(log.records());
    assert_eq!(after.findings, []);
    let facts = before.counts.facts + 2;
    assert_eq!(after.counts, crate::AuditCounts { facts, ..before.counts });

    let mut records = log.records().to_vec();
    drop_fact(&mut records, "flotilla.r1.verdicts.1.t");
    let findings = audit(&records).findings;
    assert!(findings.iter().any(|found| found.description.ends_with(": never verified")));
    let mut auditor = crate::RunAuditor::default();
    records.iter().for_each(|record| auditor.audit_record(record));
    assert!(auditor.current_run().is_some_and(|run| run.done.is_some()));
    auditor.mark_unreadable(1);
    assert_eq!(auditor.finish_audit().unwrap().findings, []);
}

/// A fact by which an agent declines an order.
fn declined(sequence: u64, job: &str, agent: &str) -> Record {
    let subject = format!("flotilla.r1.declined.1.{job}.1.{agent}").parse().unwrap();
    let body = v1::Declined {
        run: "r1".into(),
        cycle: 1,
        job: job.into(),
        attempt: 1,
        agent: agent.into(),
        ..Default::default()
    };
    let fact = wire::Fact { subject, body: FactBody::Declined(body) };
    Record { sequence, time_ms: sequence, author: None, fact }
}

#[test]
fn declined_orders_that_were_not_there_are_counted_and_no_contradiction() {
    let mut records = raft_log().records().to_vec();
    let last = records.last().unwrap().sequence;
    records.extend((1..=3).map(|number| declined(last + number, &format!("x{number}"), "g9")));
    let audit = audit(&records);
    assert_eq!(audit.findings, []);
    assert_eq!(audit.caveats, ["g9 declined 3 orders that were not there; that changes nothing"]);
}

#[test]
fn many_contradictions_of_a_kind_do_not_hide_others() {
    let mut records = raft_log().records().to_vec();
    let last = records.last().unwrap().sequence;
    for number in 1..=150 {
        let mut spec = records[0].clone();
        spec.sequence = last + number;
        records.push(spec);
    }
    let subject = "flotilla.r1.control.1".parse().unwrap();
    let fact = wire::Fact { subject, body: FactBody::Control(<_>::default()) };
    records.push(Record { sequence: last + 151, time_ms: last, author: None, fact });
    let audit = audit(&records);
    let seconds = audit.findings.iter().filter(|found| found.description == "a second spec");
    assert_eq!((seconds.count(), audit.findings_left_out), (100, 50));
    assert!(audit.findings.iter().any(|found| found.sequence == Some(last + 151)));
}
