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
use wire::{Body, Fact, JobId, Place, Prompt, Record, Subject, v1};

use crate::{
    proof,
    state::{Anomaly, Cycle, Run},
};

/// What an audit found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audit {
    pub tally: Tally,
    /// In log order. Empty for a clean log.
    pub findings: Vec<Finding>,
    /// What the log holds to by the spec's leave alone, for people.
    pub caveats: Vec<String>,
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
    /// What the run samples from, by purpose and suite, as far as somebody could read it.
    prompts: BTreeMap<(v1::Purpose, String), Vec<Prompt>>,
    /// Attempts ordered of each job.
    ordered: BTreeMap<(u32, JobId), BTreeSet<u32>>,
    findings: Vec<Finding>,
    /// Samples by agent and by why their policy could not be verified.
    unverified: BTreeMap<(String, String), u64>,
    /// Cycles whose boxes differ in what they show, and nobody knows who is right.
    disputed: Vec<String>,
    /// Of cycles that were archived: the run holds their parts no longer.
    settled: Tally,
    unfinished: Vec<String>,
    /// Cycles whose facts nobody could read: what is said of them means nothing.
    unread: BTreeSet<u32>,
}

/// Audits the facts of one run, in log order. `None` when they hold no spec.
pub fn audit<'a>(records: impl IntoIterator<Item = &'a Record>) -> Option<Audit> {
    let mut auditor = Auditor::default();
    records.into_iter().for_each(|record| auditor.take(record));
    auditor.finish()
}

impl Auditor {
    /// The prompts of a purpose and suite, so that what was ordered is compared with them. May come
    /// any time before the first order.
    pub fn know_prompts(&mut self, purpose: v1::Purpose, suite: &str, prompts: Vec<Prompt>) {
        self.prompts.insert((purpose, suite.to_owned()), prompts);
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
        let place = &record.fact.subject.place;
        let archived = |number| run.cycles.get(&number).is_some_and(|c| c.archived.is_some());
        if place.is_bulky() && place.cycle().is_some_and(archived) {
            return;
        }
        if let Place::Selection { cycle } = place {
            self.disputed.extend(proof::dispute(run, *cycle));
        }
        for what in self.look(run, &record.fact) {
            self.find(record, what);
        }
        if let Place::Archived { cycle } = place {
            self.settle(*cycle);
        }
        if let (Place::GenerateOrder { cycle, job, attempt, .. }, Body::GenerateOrder(_)) =
            (&record.fact.subject.place, &record.fact.body)
        {
            self.ordered.entry((*cycle, job.clone())).or_default().insert(*attempt);
        }
        self.note_caveat(&record.fact.body);
        if let Some(run) = &mut self.run {
            run.fold(record);
            // Taken at once: folding forgets what it thought of a cycle that was archived.
            let anomaly = |Anomaly { sequence, subject, what }| Finding {
                sequence: Some(sequence),
                subject: Some(subject),
                what,
            };
            self.findings.extend(std::mem::take(&mut run.anomalies).into_iter().map(anomaly));
        }
    }

    fn note_caveat(&mut self, body: &Body) {
        let Body::Samples(samples) = body else { return };
        let raft = self.run.as_ref().and_then(Run::raft);
        if raft.is_some_and(|raft| raft.accept_unverified_policy) && !samples.caveat.is_empty() {
            let why = (samples.agent.clone(), samples.caveat.clone());
            *self.unverified.entry(why).or_default() += samples.samples.len() as u64;
        }
    }

    /// Counts a cycle before folding lets go of its parts.
    fn settle(&mut self, number: u32) {
        let Some(run) = &self.run else { return };
        let done = run.cycles.get(&number).filter(|cycle| cycle.done.is_some());
        let Some(cycle) = done else { return };
        self.unfinished.extend(results::unfinished_cycle(run, number, cycle));
        let jobs = Tally::of_jobs(cycle);
        self.settled.planned_samples += jobs.planned_samples;
        self.settled.accepted_samples += jobs.accepted_samples;
        self.settled.set_aside_samples += jobs.set_aside_samples;
        self.settled.judged_samples += jobs.judged_samples;
        self.ordered.retain(|(cycle, _), _| *cycle != number);
    }

    /// Says that a cycle's archived facts cannot be read.
    pub fn cannot_read(&mut self, cycle: u32) {
        self.unread.insert(cycle);
    }

    /// What is wrong with a fact, given the facts before it, that folding does not notice.
    fn look(&self, run: &Run, fact: &Fact) -> Vec<String> {
        match (&fact.subject.place, &fact.body) {
            (Place::Plan { cycle }, Body::Plan(plan)) => plans::plan(run, *cycle, plan),
            (Place::GenerateOrder { cycle, job, .. }, Body::GenerateOrder(order)) => {
                let prompts = self.prompts.get(&(order.purpose(), order.suite.clone()));
                let trained = self.prompts.get(&(v1::Purpose::Train, String::new()));
                let mut found =
                    orders::generate(run, *cycle, job, order, prompts.map(Vec::as_slice));
                found.extend(orders::canary(run, *cycle, order, trained.map(Vec::as_slice)));
                found
            }
            (Place::TrainOrder { cycle, .. }, Body::TrainOrder(order)) => {
                orders::train(run, *cycle, order)
            }
            (Place::Samples { cycle, job }, Body::Samples(samples)) => {
                let attempts = self.ordered.get(&(*cycle, job.clone()));
                let ordered = attempts.is_some_and(|all| all.contains(&samples.attempt));
                results::samples(run, *cycle, job, samples, ordered)
            }
            (Place::Quarantine { .. }, Body::Quarantine(quarantine)) => {
                proof::unfounded(run, quarantine).into_iter().collect()
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
        let Self { run, facts, mut findings, unverified, disputed, settled, .. } = self;
        let (mut unfinished, unread) = (self.unfinished, self.unread);
        let run = run?;
        findings.retain(|finding| {
            let subject: Option<Subject> = finding.subject.as_ref().and_then(|s| s.parse().ok());
            let cycle = subject.and_then(|subject| subject.place.cycle());
            cycle.is_none_or(|cycle| !unread.contains(&cycle))
        });
        findings.sort();
        findings.dedup();
        if run.done.as_ref().is_some_and(|done| done.status() == v1::done::Status::Succeeded) {
            // What was drawn ahead for a cycle that never came needs no end.
            let last = run.stopped_after().unwrap_or(u32::MAX);
            let open = run.cycles.range(..=last).filter(|(_, cycle)| cycle.archived.is_none());
            for (number, cycle) in open {
                unfinished.extend(results::unfinished_cycle(&run, *number, cycle));
            }
            if unread.is_empty() {
                let missing = |what: String| Finding { sequence: None, subject: None, what };
                findings.extend(unfinished.into_iter().map(missing));
            }
        }
        let caveat = |((agent, why), count): ((String, String), u64)| {
            format!("{count} samples by {agent} count, as the spec accepts, though {why}")
        };
        let caveats = unverified.into_iter().map(caveat).chain(disputed).collect();
        Some(Audit { tally: tally(&run, facts, settled), findings, caveats })
    }
}

impl Tally {
    fn of_jobs(cycle: &Cycle) -> Self {
        let jobs = || cycle.jobs.values();
        Self {
            planned_samples: jobs().flat_map(|job| &job.draws).map(|d| u64::from(d.count)).sum(),
            accepted_samples: jobs()
                .filter_map(|job| job.samples.as_ref())
                .map(|samples| u64::from(samples.count))
                .sum(),
            set_aside_samples: jobs()
                .filter(|job| job.set_aside.is_some())
                .map(|job| u64::from(job.planned()))
                .sum(),
            judged_samples: jobs()
                .filter_map(|job| job.verdicts.as_ref())
                .map(|verdicts| verdicts.verdicts.len() as u64)
                .sum(),
            ..Self::default()
        }
    }
}

fn tally(run: &Run, facts: u64, settled: Tally) -> Tally {
    let mut tally = Tally { facts, ..settled };
    for cycle in run.cycles.values() {
        let jobs = Tally::of_jobs(cycle);
        tally.planned_samples += jobs.planned_samples;
        tally.accepted_samples += jobs.accepted_samples;
        tally.set_aside_samples += jobs.set_aside_samples;
        tally.judged_samples += jobs.judged_samples;
        tally.kept_samples += cycle.selected.as_ref().map_or(0, |s| u64::from(s.kept));
        tally.checkpoints += cycle.checkpoints.len() as u64;
        tally.evals += cycle.evals.len() as u64;
    }
    tally
}
