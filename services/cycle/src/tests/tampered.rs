//! Tampered logs: an audit finds each change and names the fact.

use wire::{FactBody, FactKey, Record, v1};

use super::log::{Log, prompts, raft, sft, watched};
use crate::{RunAudit, RunAuditor};

/// A change of a clean log, and the finding that the audit must report.
struct Case {
    name: &'static str,
    tamper: fn(&mut Vec<Record>),
    subject: &'static str,
    what: &'static str,
}

fn raft_log() -> Vec<Record> {
    let mut log = Log::new(raft(2));
    log.run_to_the_end();
    log.records().to_vec()
}

pub(super) fn audit(records: &[Record]) -> RunAudit {
    let mut auditor = RunAuditor::default();
    auditor.add_prompts(v1::Purpose::Train, "", prompts("p", 20));
    auditor.add_prompts(v1::Purpose::Heldout, "", prompts("h", 10));
    records.iter().for_each(|record| auditor.audit_record(record));
    auditor.finish_audit().unwrap()
}

/// The first body of that kind under a subject with this prefix.
macro_rules! body {
    ($records:expr, $kind:ident, $subject:expr) => {{
        let found = $records.iter_mut().find_map(|record| {
            let subject = record.fact.subject.to_string();
            match &mut record.fact.body {
                FactBody::$kind(body) if subject.starts_with($subject) => Some(body),
                _ => None,
            }
        });
        found.unwrap()
    }};
}

pub(super) fn position(records: &[Record], subject: &str) -> usize {
    records.iter().position(|r| r.fact.subject.to_string().starts_with(subject)).unwrap()
}

pub(super) fn drop_fact(records: &mut Vec<Record>, subject: &str) {
    records.remove(position(records, subject));
}

fn of_place(records: &mut [Record], fits: fn(&FactKey) -> bool) -> Vec<&mut Record> {
    records.iter_mut().filter(|record| fits(&record.fact.subject.key)).collect()
}

const CASES: [Case; 25] = [
    Case {
        name: "a samples fact is dropped",
        tamper: |records| drop_fact(records, "flotilla.r1.samples.1.t"),
        subject: "flotilla.r1.verdicts.1.t",
        what: "verdicts before any samples",
    },
    Case {
        name: "a verdicts fact is dropped",
        tamper: |records| drop_fact(records, "flotilla.r1.verdicts.1.t"),
        subject: "flotilla.r1.selection.1",
        what: "selected before every sample was judged",
    },
    Case {
        name: "a sample is dropped from its fact",
        tamper: |records| {
            body!(records, Samples, "flotilla.r1.samples.1.t").samples.pop();
        },
        subject: "flotilla.r1.samples.1.t",
        what: "not the samples that were ordered",
    },
    Case {
        name: "a sample is there twice",
        tamper: |records| {
            let samples = &mut body!(records, Samples, "flotilla.r1.samples.1.t").samples;
            samples.push(samples[0].clone());
        },
        subject: "flotilla.r1.samples.1.t",
        what: "not the samples that were ordered",
    },
    Case {
        name: "a kept sample's text is changed",
        tamper: |records| {
            for sample in &mut body!(records, Samples, "flotilla.r1.samples.1.t").samples {
                sample.text.push('!');
            }
        },
        subject: "flotilla.r1.selection.1",
        what: "does not follow from the cycle's verdicts",
    },
    Case {
        name: "a reward is changed",
        tamper: |records| {
            body!(records, Verdicts, "flotilla.r1.verdicts.1.t").verdicts[1].reward = 0.75;
        },
        subject: "flotilla.r1.verdicts.1.t",
        what: "a reward of 0.75",
    },
    Case {
        name: "a failed sample is made one that passed",
        tamper: |records| {
            let verdict = &mut body!(records, Verdicts, "flotilla.r1.verdicts.1.t").verdicts[0];
            (verdict.outcome, verdict.reward) = (v1::verdicts::Outcome::Pass.into(), 1.0);
        },
        subject: "flotilla.r1.cycle.1.done",
        what: "counts do not follow",
    },
    Case {
        name: "a held-out verdict is changed",
        tamper: |records| {
            let verdict = &mut body!(records, Verdicts, "flotilla.r1.verdicts.1.h").verdicts[0];
            (verdict.outcome, verdict.reward) = (v1::verdicts::Outcome::Pass.into(), 1.0);
        },
        subject: "flotilla.r1.cycle.1.done",
        what: "counts do not follow",
    },
    Case {
        name: "two jobs' verdicts change places",
        tamper: |records| {
            let wanted = |place: &FactKey| matches!(place, FactKey::Verdicts { cycle: 1, job } if job.as_str().starts_with('t'));
            let mut found = of_place(records, wanted).into_iter();
            let (one, two) = (found.next().unwrap(), found.next().unwrap());
            std::mem::swap(&mut one.fact.body, &mut two.fact.body);
        },
        subject: "flotilla.r1.verdicts.1.t",
        what: "its job is not its subject's",
    },
    Case {
        name: "a selection keeps one more",
        tamper: |records| body!(records, Selected, "flotilla.r1.selection.1").kept += 1,
        subject: "flotilla.r1.selection.1",
        what: "does not follow from the cycle's verdicts",
    },
    Case {
        name: "a selection's dataset is another's",
        tamper: |records| {
            let other = body!(records, Selected, "flotilla.r1.selection.2").dataset.clone();
            body!(records, Selected, "flotilla.r1.selection.1").dataset = other;
        },
        subject: "flotilla.r1.selection.1",
        what: "does not follow from the cycle's verdicts",
    },
    Case {
        name: "training is ordered on another dataset",
        tamper: |records| {
            body!(records, TrainOrder, "flotilla.r1.order.train").dataset = None;
        },
        subject: "flotilla.r1.order.train.default.1",
        what: "its dataset is not what was selected",
    },
    Case {
        name: "a checkpoint has a wrong parent",
        tamper: |records| {
            let parent = &mut body!(records, Checkpoint, "flotilla.r1.checkpoint.2").parent;
            *parent = Some(v1::Tree { path: "x".into(), manifest: "stranger".into() });
        },
        subject: "flotilla.r1.checkpoint.2.10",
        what: "its parent is not the checkpoint before it",
    },
    Case {
        name: "a checkpoint has a wrong base",
        tamper: |records| body!(records, Checkpoint, "flotilla.r1.checkpoint.1").base = None,
        subject: "flotilla.r1.checkpoint.1.10",
        what: "its base is not the model that was trained",
    },
    Case {
        name: "the run starts from another base",
        tamper: |records| {
            let tree = &mut body!(records, Checkpoint, "flotilla.r1.checkpoint.0").tree;
            *tree = Some(v1::Tree { path: "x".into(), manifest: "stranger".into() });
        },
        subject: "flotilla.r1.checkpoint.0.0",
        what: "it is not the spec's base",
    },
    Case {
        name: "a plan draws a sample twice",
        tamper: |records| {
            let plan = body!(records, Plan, "flotilla.r1.cycle.1.plan");
            let draw = plan.jobs[0].draws[0];
            plan.jobs[1].draws.push(v1::plan::Draw { first: draw.first + 1, count: 1, ..draw });
        },
        subject: "flotilla.r1.cycle.1.plan",
        what: "1 train samples are planned twice, the first of them sample 1",
    },
    Case {
        name: "a plan leaves a sample out",
        tamper: |records| {
            body!(records, Plan, "flotilla.r1.cycle.1.plan").jobs[0].draws[0].count -= 1;
        },
        subject: "flotilla.r1.cycle.1.plan",
        what: "1 train samples are not planned, the first of them sample 7",
    },
    Case {
        name: "a plan draws a prompt that is not there",
        tamper: |records| {
            let plan = body!(records, Plan, "flotilla.r1.cycle.1.plan");
            plan.jobs[0].draws.push(v1::plan::Draw { prompt: 99, first: 0, count: 3 });
        },
        subject: "flotilla.r1.cycle.1.plan",
        what: "3 train samples are planned, but not to be drawn",
    },
    Case {
        name: "an order asks for another prompt",
        tamper: |records| {
            body!(records, GenerateOrder, "flotilla.r1.order.generate.default.1").requests[0]
                .text
                .push('9');
        },
        subject: "flotilla.r1.order.generate.default.1",
        what: "is not line",
    },
    Case {
        name: "an order has another seed",
        tamper: |records| {
            body!(records, GenerateOrder, "flotilla.r1.order.generate.default.1").seed += 1;
        },
        subject: "flotilla.r1.order.generate.default.1",
        what: "its seed does not follow from the run's",
    },
    Case {
        name: "an order is dropped",
        tamper: |records| drop_fact(records, "flotilla.r1.order.generate.default.1"),
        subject: "flotilla.r1.samples.1.t",
        what: "was never ordered",
    },
    Case {
        name: "a training is dropped",
        tamper: |records| drop_fact(records, "flotilla.r1.order.train.default.1"),
        subject: "flotilla.r1.checkpoint.1.10",
        what: "no training was ordered",
    },
    Case {
        name: "an eval is of another checkpoint",
        tamper: |records| body!(records, Eval, "flotilla.r1.eval.2").manifest = "stranger".into(),
        subject: "flotilla.r1.eval.2.10.text",
        what: "measured something else than its checkpoint",
    },
    Case {
        name: "a cycle's checkpoint is dropped",
        tamper: |records| drop_fact(records, "flotilla.r1.checkpoint.1"),
        subject: "flotilla.r1.cycle.2.plan",
        what: "planned before the cycle before it was done",
    },
    Case {
        name: "a cycle's end is dropped",
        tamper: |records| drop_fact(records, "flotilla.r1.cycle.1.done"),
        subject: "flotilla.r1.cycle.2.done",
        what: "done before the cycle before it was",
    },
];

#[test]
fn whatever_is_changed_in_a_log_is_found_and_named() {
    let clean = raft_log();
    assert_eq!(audit(&clean).findings, []);
    for Case { name, tamper, subject, what } in CASES {
        let mut records = clean.clone();
        tamper(&mut records);
        assert_ne!(records, clean, "{name}: nothing was changed");
        let findings = audit(&records).findings;
        let named = findings.iter().any(|finding| {
            finding.sequence.is_some()
                && finding.description.contains(what)
                && finding.subject.as_ref().is_some_and(|found| found.starts_with(subject))
        });
        assert!(named, "{name}: {findings:#?}");
    }
}

#[test]
fn without_any_one_fact_a_finished_run_is_not_clean() {
    let clean = raft_log();
    for left_out in 1..clean.len() - 1 {
        let mut records = clean.clone();
        let dropped = records.remove(left_out).fact.subject;
        // Version 0.2.0 did not write them; the end of the cycle repeats them.
        if matches!(dropped.key, FactKey::PassRates { .. }) {
            continue;
        }
        assert_ne!(audit(&records).findings, [], "{dropped} is not missed");
    }
}

#[test]
fn a_supervised_run_belongs_to_its_spec() {
    let mut log = Log::new(sft());
    log.run_to_the_end();
    let clean = log.records().to_vec();
    assert_eq!(audit(&clean).findings, []);
    let mut records = clean.clone();
    body!(records, Checkpoint, "flotilla.r1.checkpoint.0").parent = None;
    assert_eq!(audit(&records).findings[0].description, "its parent is not the spec's base");
    let mut records = clean;
    body!(records, TrainOrder, "flotilla.r1.order.train").dataset = None;
    assert_eq!(audit(&records).findings[0].description, "its dataset is not the spec's");
}

/// A change of a checkpoint, and the finding that the audit must report.
type Change = (fn(&mut v1::Checkpoint), &'static str);

#[test]
fn a_watched_run_stands_on_its_specs_base() {
    let mut log = Log::new(watched());
    for step in [10, 20, 30] {
        log.find_checkpoint(step);
        log.evaluate();
        log.coordinate();
    }
    let clean = log.records().to_vec();
    assert_eq!(audit(&clean).findings, []);
    let stranger = || Some(v1::Tree { manifest: "stranger".into(), ..Default::default() });
    let changes: [Change; 6] = [
        (|c| c.base = Some(v1::Tree::default()), "its base is not the spec's"),
        (|c| c.base = None, "its base is not the spec's"),
        (|c| c.parent = None, "its parent is not the spec's base"),
        (|c| c.r#final = true, "its step, steps and final contradict"),
        (|c| c.tree = None, "it names no tree"),
        (|c| c.resume = Some(v1::Tree::default()), "a watched run cannot be resumed"),
    ];
    for (change, what) in changes {
        let mut records = clean.clone();
        change(body!(records, Checkpoint, "flotilla.r1.checkpoint.watched.20"));
        let findings = audit(&records).findings;
        assert!(
            findings.iter().any(|finding| finding.description == what),
            "{what}: {findings:#?}"
        );
    }
    let mut records = clean.clone();
    body!(records, Spec, "flotilla.r1.watched").base.as_mut().unwrap().tree = stranger();
    let findings = audit(&records).findings;
    assert_eq!(findings.len(), 6, "base and parent of three checkpoints: {findings:#?}");
    let mut records = clean;
    drop_fact(&mut records, "flotilla.r1.checkpoint.watched.20");
    assert_eq!(audit(&records).findings[0].description, "an eval before its checkpoint");
}

#[test]
fn an_audit_without_the_prompts_still_compares_what_was_planned() {
    let mut records = raft_log();
    let order = body!(records, GenerateOrder, "flotilla.r1.order.generate.default.1");
    order.requests[0].count += 1;
    let findings = crate::audit_records(&records).unwrap().findings;
    assert!(findings[0].description.contains("differs from the plan"), "{findings:#?}");
}
