//! Re-derives a run from its log alone and says where the log contradicts itself.
//!
//! Folding notes what contradicts a run's state as an anomaly; `audit/` looks at each fact
//! beside that, and the whole is looked at once more at its end.

mod agree;
mod orders;
mod plans;
mod results;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use wire::{Body, Fact, JobId, Place, Prompt, Record, v1};

use crate::state::{Anomaly, Run};

/// What an audit found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audit {
    pub tally: Tally,
    /// In log order. Empty for a clean log.
    pub findings: Vec<Finding>,
}

/// What a run's facts add up to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    pub facts: u64,
    pub planned_samples: u64,
    pub accepted_samples: u64,
    pub judged_samples: u64,
    pub kept_samples: u64,
    /// Planned, and given up with a failure that says why.
    pub set_aside_samples: u64,
    pub checkpoints: u64,
    pub evals: u64,
}

/// A contradiction, and the fact at fault where it is one fact.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    pub sequence: Option<u64>,
    pub subject: Option<String>,
    pub what: String,
}

/// Audits the facts of one run as they come, in log order, without keeping them.
#[derive(Debug, Default)]
pub struct Auditor {
    run: Option<Run>,
    facts: u64,
    prompts: Prompts,
    /// Attempts ordered of each job.
    ordered: BTreeMap<(u32, JobId), BTreeSet<u32>>,
    findings: Vec<Finding>,
}

/// The prompts a run samples from; `None` where nobody could read them.
#[derive(Debug, Default)]
struct Prompts {
    train: Option<Vec<Prompt>>,
    heldout: Option<Vec<Prompt>>,
}

impl Prompts {
    fn of(&self, purpose: v1::Purpose) -> Option<&[Prompt]> {
        match purpose {
            v1::Purpose::Heldout => self.heldout.as_deref(),
            v1::Purpose::Train | v1::Purpose::Unspecified => self.train.as_deref(),
        }
    }
}

/// Audits the facts of one run, in log order. `None` when they hold no spec.
pub fn audit<'a>(records: impl IntoIterator<Item = &'a Record>) -> Option<Audit> {
    let mut auditor = Auditor::default();
    records.into_iter().for_each(|record| auditor.take(record));
    auditor.finish()
}

impl Auditor {
    /// The prompts files, so that what was ordered is compared with them. May come any time
    /// before the first order.
    pub fn know_prompts(&mut self, train: Option<Vec<Prompt>>, heldout: Option<Vec<Prompt>>) {
        self.prompts = Prompts { train, heldout };
    }

    /// The run so far; `None` before its spec.
    pub fn run(&self) -> Option<&Run> {
        self.run.as_ref()
    }

    pub fn take(&mut self, record: &Record) {
        self.facts += 1;
        if let Some(what) = agree::disagreement(&record.fact) {
            self.find(record, what);
        }
        let Some(run) = &self.run else {
            self.run = Run::start(record);
            if self.run.is_none() {
                self.find(record, "stands before the run's spec".into());
            }
            return;
        };
        for what in self.look(run, &record.fact) {
            self.find(record, what);
        }
        if let (Place::GenerateOrder { cycle, job, attempt, .. }, Body::GenerateOrder(_)) =
            (&record.fact.subject.place, &record.fact.body)
        {
            self.ordered.entry((*cycle, job.clone())).or_default().insert(*attempt);
        }
        if let Some(run) = &mut self.run {
            run.fold(record);
        }
    }

    /// What is wrong with a fact, given the facts before it, that folding does not notice.
    fn look(&self, run: &Run, fact: &Fact) -> Vec<String> {
        match (&fact.subject.place, &fact.body) {
            (Place::Plan { cycle }, Body::Plan(plan)) => plans::plan(run, *cycle, plan),
            (Place::GenerateOrder { cycle, job, .. }, Body::GenerateOrder(order)) => {
                let prompts = self.prompts.of(order.purpose());
                orders::generate(run, *cycle, job, order, prompts)
            }
            (Place::TrainOrder { cycle, .. }, Body::TrainOrder(order)) => {
                orders::train(run, *cycle, order)
            }
            (Place::Samples { cycle, job }, Body::Samples(samples)) => {
                let attempts = self.ordered.get(&(*cycle, job.clone()));
                let ordered = attempts.is_some_and(|all| all.contains(&samples.attempt));
                results::samples(run, *cycle, job, samples, ordered)
            }
            (Place::Verdicts { cycle, job }, Body::Verdicts(verdicts)) => {
                results::verdicts(run, *cycle, job, verdicts)
            }
            (Place::Selection { cycle }, Body::Selected(_)) => results::selection(run, *cycle),
            (Place::Checkpoint { cycle, .. }, Body::Checkpoint(checkpoint)) => {
                results::checkpoint(run, *cycle, checkpoint)
            }
            (Place::Eval { suite, .. }, Body::Eval(eval)) => results::eval(run, suite, eval),
            (Place::CycleDone { cycle }, Body::CycleDone(done)) => {
                results::cycle_done(run, *cycle, done)
            }
            (Place::Done, Body::Done(done)) => results::done(run, done),
            _ => Vec::new(),
        }
    }

    fn find(&mut self, record: &Record, what: String) {
        let subject = Some(record.fact.subject.to_string());
        self.findings.push(Finding { sequence: Some(record.sequence), subject, what });
    }

    /// The verdict on all that was taken. `None` when there was no spec.
    pub fn finish(self) -> Option<Audit> {
        let Self { run, facts, mut findings, .. } = self;
        let run = run?;
        let anomaly = |Anomaly { sequence, subject, what }: &Anomaly| Finding {
            sequence: Some(*sequence),
            subject: Some(subject.clone()),
            what: what.clone(),
        };
        findings.extend(run.anomalies.iter().map(anomaly));
        findings.sort();
        findings.dedup();
        if run.done.as_ref().is_some_and(|done| done.status() == v1::done::Status::Succeeded) {
            let missing = results::unfinished(&run);
            findings.extend(missing.into_iter().map(|what| Finding {
                sequence: None,
                subject: None,
                what,
            }));
        }
        Some(Audit { tally: tally(&run, facts), findings })
    }
}

fn tally(run: &Run, facts: u64) -> Tally {
    let jobs = || run.cycles.values().flat_map(|cycle| cycle.jobs.values());
    let count = |n: usize| n as u64;
    Tally {
        facts,
        planned_samples: jobs().flat_map(|job| &job.draws).map(|draw| u64::from(draw.count)).sum(),
        accepted_samples: jobs()
            .filter_map(|job| job.samples.as_ref())
            .map(|samples| u64::from(samples.count))
            .sum(),
        judged_samples: jobs()
            .filter_map(|job| job.verdicts.as_ref())
            .map(|verdicts| count(verdicts.verdicts.len()))
            .sum(),
        set_aside_samples: jobs()
            .filter(|job| job.set_aside.is_some())
            .map(|job| u64::from(job.planned()))
            .sum(),
        kept_samples: run
            .cycles
            .values()
            .filter_map(|cycle| cycle.selected.as_ref())
            .map(|selected| u64::from(selected.kept))
            .sum(),
        checkpoints: run.cycles.values().map(|cycle| count(cycle.checkpoints.len())).sum(),
        evals: run.cycles.values().map(|cycle| count(cycle.evals.len())).sum(),
    }
}
