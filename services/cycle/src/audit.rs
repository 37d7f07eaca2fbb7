//! Re-derives a run from its log alone and reports contradictions. Folding records facts that
//! contradict the state as anomalies; the modules of `audit/` check each fact beyond that, and the
//! end of the audit checks whether the run is complete.

mod order_checks;
mod plan_checks;
mod result_checks;
mod subject_checks;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use wire::{ErrorCode, Fact, FactBody, FactKey, JobId, PromptEntry, Record, Subject, v1};

use crate::{
    canary_vote,
    fold::cut_failure_text,
    state::{Cycle, FactAnomaly, Run},
};

/// The result of an audit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunAudit {
    pub counts: AuditCounts,
    /// Contradictions in log order. Empty for a clean log.
    pub findings: Vec<LogContradiction>,
    /// Contradictions beyond those that are listed.
    pub findings_left_out: u64,
    /// Facts that cannot be verified but that the spec accepts, undecided canary votes, and merges
    /// that differ between boxes; for display.
    pub caveats: Vec<String>,
}

/// Counts of a run's facts and samples.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct AuditCounts {
    pub facts: u64,
    pub planned_samples: u64,
    pub accepted_samples: u64,
    pub judged_samples: u64,
    pub kept_samples: u64,
    /// Planned samples whose jobs were given up with a failure that contains the reason.
    pub set_aside_samples: u64,
    pub checkpoints: u64,
    pub evals: u64,
}

/// A contradiction in the log, with the fact that caused it if it is a single one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LogContradiction {
    pub sequence: Option<u64>,
    pub subject: Option<String>,
    pub description: String,
}

/// An audit of one run. Takes its facts as they arrive, in log order, without storing them: call
/// [`RunAuditor::add_prompts`] with the run's prompts, [`RunAuditor::audit_record`] for each fact,
/// and [`RunAuditor::finish_audit`] at the end.
#[derive(Debug, Default)]
pub struct RunAuditor {
    run: Option<Run>,
    facts: u64,
    /// Prompts by purpose and suite, as far as they could be read.
    prompts: BTreeMap<(v1::Purpose, String), Vec<PromptEntry>>,
    ordered_attempts: BTreeMap<(u32, JobId), BTreeSet<u32>>,
    findings: FindingList,
    /// Number of orders by agent that it declined though they were not there. Such facts change
    /// nothing.
    unknown_declines: BTreeMap<String, u64>,
    /// Number of samples by agent and by the reason why their policy could not be verified.
    unverified_samples: BTreeMap<(String, String), u64>,
    undecided_votes: Vec<String>,
    /// Reports of agents whose merged weights differ from those in the log.
    differing_merges: BTreeSet<String>,
    /// Counts of archived cycles, whose jobs the run no longer contains.
    archived_counts: AuditCounts,
    /// Missing parts of archived cycles.
    unfinished: Vec<String>,
    /// Findings about these cycles are meaningless.
    unreadable_cycles: BTreeSet<u32>,
}

/// The contradictions found so far. Of each kind only some are listed, so that one member cannot
/// hide others behind many of its own.
#[derive(Debug, Default)]
pub(crate) struct FindingList {
    pub(crate) listed: Vec<LogContradiction>,
    by_kind: BTreeMap<String, u32>,
    pub(crate) left_out: u64,
}

/// The listed contradictions with the same description.
const FINDINGS_OF_KIND_MAX: u32 = 100;

/// The error of a box that merges the same weights to other bytes than another.
const MERGE_DIFFERS: &str = "E118";

/// The most reports of such boxes.
const DIFFERENCES_MAX: usize = 100;

/// The listed contradictions of all kinds.
const FINDINGS_MAX: usize = 10_000;

impl FindingList {
    pub(crate) fn add_finding(&mut self, finding: LogContradiction) {
        let full = self.listed.len() >= FINDINGS_MAX;
        let of_kind = self.by_kind.get(&finding.description).copied().unwrap_or(0);
        if full || of_kind >= FINDINGS_OF_KIND_MAX {
            self.left_out += 1;
            return;
        }
        self.by_kind.insert(finding.description.clone(), of_kind + 1);
        self.listed.push(finding);
    }
}

/// Audits the facts of one run, in log order, without its prompts: orders are not compared with
/// them. Returns `None` if the facts contain no spec.
pub fn audit_records<'a>(records: impl IntoIterator<Item = &'a Record>) -> Option<RunAudit> {
    let mut auditor = RunAuditor::default();
    records.into_iter().for_each(|record| auditor.audit_record(record));
    auditor.finish_audit()
}

impl RunAuditor {
    /// Adds the prompts of a purpose and suite (empty for the run's own prompts), in the order of
    /// their file, so that orders are compared with them. Must be called before the first order;
    /// orders of other prompt sets are not compared.
    pub fn add_prompts(&mut self, purpose: v1::Purpose, suite: &str, prompts: Vec<PromptEntry>) {
        self.prompts.insert((purpose, suite.to_owned()), prompts);
    }

    /// Returns the run folded so far; `None` before its spec.
    pub fn current_run(&self) -> Option<&Run> {
        self.run.as_ref()
    }

    /// Checks the next fact of the run against the facts before it, and folds it. Contradictions
    /// are returned by [`RunAuditor::finish_audit`].
    pub fn audit_record(&mut self, record: &Record) {
        self.facts += 1;
        if let Some(what) = subject_checks::check_subject(&record.fact) {
            self.record_finding(record, what);
        }
        let Some(run) = &self.run else {
            self.run = Run::start(record);
            if self.run.is_none() {
                self.record_finding(record, "stands before the run's spec".into());
            }
            return;
        };
        let place = &record.fact.subject.key;
        let archived = |number| run.cycles.get(&number).is_some_and(|c| c.archived.is_some());
        if place.is_bulky() && place.cycle_number().is_some_and(archived) {
            return;
        }
        if let FactKey::Selection { cycle } = place {
            self.undecided_votes.extend(canary_vote::undecided_vote(run, *cycle));
        }
        if let FactKey::Declined { cycle, job, attempt, agent } = place {
            let ordered = self.ordered_attempts.get(&(*cycle, job.clone()));
            if !archived(*cycle) && !ordered.is_some_and(|all| all.contains(attempt)) {
                *self.unknown_declines.entry(agent.to_string()).or_default() += 1;
            }
        }
        if !run.is_late_result(place) {
            for what in self.check_fact(run, &record.fact) {
                self.record_finding(record, what);
            }
        }
        if let FactKey::Archived { cycle } = place {
            self.count_archived_cycle(*cycle);
        }
        if let (FactKey::GenerateOrder { cycle, job, attempt, .. }, FactBody::GenerateOrder(_)) =
            (&record.fact.subject.key, &record.fact.body)
        {
            self.ordered_attempts.entry((*cycle, job.clone())).or_default().insert(*attempt);
        }
        self.record_caveat(&record.fact.body);
        if let Some(run) = &mut self.run {
            run.fold_record(record);
            // Taken immediately: the fold drops the anomalies of a cycle when it is archived.
            let anomaly = |FactAnomaly { sequence, subject, description: what }| LogContradiction {
                sequence: Some(sequence),
                subject: Some(subject),
                description: what,
            };
            let anomalies = std::mem::take(&mut run.anomalies);
            anomalies.into_iter().map(anomaly).for_each(|found| self.findings.add_finding(found));
        }
    }

    fn record_caveat(&mut self, body: &FactBody) {
        match body {
            FactBody::Samples(samples) => self.count_unverified(samples),
            FactBody::Failure(failure) => self.note_difference(failure),
            _ => {}
        }
    }

    /// Notes the report of an agent that has computed other bytes for a merge.
    fn note_difference(&mut self, failure: &v1::Failure) {
        let v1::Failure { kind, id, agent, message, .. } = failure;
        let is_difference = ErrorCode::find_in_text(message) == ErrorCode::parse(MERGE_DIFFERS);
        if is_difference && self.differing_merges.len() < DIFFERENCES_MAX {
            let report = format!("{kind} {id}: {agent} reports that {message}");
            self.differing_merges.insert(cut_failure_text(&report));
        }
    }

    /// Counts samples whose policy could not be verified, if the spec accepts them.
    fn count_unverified(&mut self, samples: &v1::Samples) {
        let raft = self.run.as_ref().and_then(Run::raft_spec);
        if raft.is_some_and(|raft| raft.accept_unverified_policy) && !samples.caveat.is_empty() {
            let why = (samples.agent.clone(), samples.caveat.clone());
            *self.unverified_samples.entry(why).or_default() += samples.samples.len() as u64;
        }
    }

    /// Called before the fold drops the cycle's jobs.
    fn count_archived_cycle(&mut self, number: u32) {
        let Some(run) = &self.run else { return };
        let done = run.cycles.get(&number).filter(|cycle| cycle.done.is_some());
        let Some(cycle) = done else { return };
        self.unfinished.extend(result_checks::find_missing_results(run, number, cycle));
        let jobs = AuditCounts::from_jobs(cycle);
        self.archived_counts.planned_samples += jobs.planned_samples;
        self.archived_counts.accepted_samples += jobs.accepted_samples;
        self.archived_counts.set_aside_samples += jobs.set_aside_samples;
        self.archived_counts.judged_samples += jobs.judged_samples;
        self.ordered_attempts.retain(|(cycle, _), _| *cycle != number);
    }

    /// Records that the archived facts of a cycle cannot be read: `finish_audit` then drops all
    /// findings about this cycle and does not report missing results of the run.
    pub fn mark_unreadable(&mut self, cycle: u32) {
        self.unreadable_cycles.insert(cycle);
    }

    /// Returns the contradictions that the fold does not detect, given the facts before this one.
    fn check_fact(&self, run: &Run, fact: &Fact) -> Vec<String> {
        match (&fact.subject.key, &fact.body) {
            (FactKey::Plan { cycle }, FactBody::Plan(plan)) => {
                plan_checks::check_plan(run, *cycle, plan)
            }
            (FactKey::GenerateOrder { cycle, job, .. }, FactBody::GenerateOrder(order)) => {
                let prompts = self.prompts.get(&(order.purpose(), order.suite.clone()));
                let trained = self.prompts.get(&(v1::Purpose::Train, String::new()));
                let mut found = order_checks::check_generate_order(
                    run,
                    *cycle,
                    job,
                    order,
                    prompts.map(Vec::as_slice),
                );
                found.extend(order_checks::check_canary(
                    run,
                    *cycle,
                    order,
                    trained.map(Vec::as_slice),
                ));
                found
            }
            (FactKey::TrainOrder { cycle, .. }, FactBody::TrainOrder(order)) => {
                order_checks::check_train_order(run, *cycle, order)
            }
            (FactKey::TrainPartOrder { cycle, outer, part, .. }, FactBody::TrainOrder(order)) => {
                let mut found = order_checks::check_train_order(run, *cycle, order);
                let part = (*cycle, *outer, *part);
                found.extend(order_checks::check_train_part(run, part, order));
                found
            }
            (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
                let attempts = self.ordered_attempts.get(&(*cycle, job.clone()));
                let ordered = attempts.is_some_and(|all| all.contains(&samples.attempt));
                result_checks::check_samples(run, *cycle, job, samples, ordered)
            }
            (FactKey::Quarantine { .. }, FactBody::Quarantine(quarantine)) => {
                canary_vote::check_quarantine(run, quarantine).into_iter().collect()
            }
            (FactKey::Verdicts { cycle, job }, FactBody::Verdicts(verdicts)) => {
                result_checks::check_verdicts(run, *cycle, job, verdicts)
            }
            (FactKey::Selection { cycle }, FactBody::Selected(_)) => {
                result_checks::check_selection(run, *cycle)
            }
            (
                place @ (FactKey::Checkpoint { .. } | FactKey::WatchedCheckpoint { .. }),
                FactBody::Checkpoint(checkpoint),
            ) => {
                result_checks::check_checkpoint(run, place.cycle_number().unwrap_or(0), checkpoint)
            }
            (FactKey::Eval { suite, .. }, FactBody::Eval(eval)) => {
                result_checks::check_eval(run, suite, eval)
            }
            (FactKey::PassRates { cycle }, FactBody::PassRates(rates)) => {
                result_checks::check_pass_rates(run, *cycle, rates)
            }
            (FactKey::CycleDone { cycle }, FactBody::CycleDone(done)) => {
                result_checks::check_cycle_done(run, *cycle, done)
            }
            (FactKey::Done, FactBody::Done(done)) => result_checks::check_done(run, done),
            _ => Vec::new(),
        }
    }

    fn record_finding(&mut self, record: &Record, what: String) {
        let subject = Some(record.fact.subject.to_string());
        self.findings.add_finding(LogContradiction {
            sequence: Some(record.sequence),
            subject,
            description: what,
        });
    }

    /// Returns the result of the audit; `None` if there was no spec. In a succeeded run, missing
    /// results are findings too, unless a cycle is unreadable.
    pub fn finish_audit(self) -> Option<RunAudit> {
        let Self {
            run,
            facts,
            findings: FindingList { listed: mut findings, left_out, .. },
            unknown_declines,
            unverified_samples: unverified,
            undecided_votes: disputed,
            differing_merges,
            archived_counts: settled,
            ..
        } = self;
        let (mut unfinished, unread) = (self.unfinished, self.unreadable_cycles);
        let run = run?;
        findings.retain(|finding| {
            let subject: Option<Subject> = finding.subject.as_ref().and_then(|s| s.parse().ok());
            let cycle = subject.and_then(|subject| subject.key.cycle_number());
            cycle.is_none_or(|cycle| !unread.contains(&cycle))
        });
        findings.sort();
        findings.dedup();
        if run.done.as_ref().is_some_and(|done| done.status() == v1::done::Status::Succeeded) {
            // Samples drawn ahead for a cycle after the last one need not be complete.
            let last = run.stopped_after().unwrap_or(u32::MAX);
            let own = run.cycles.range(run.first_cycle..=last.max(run.first_cycle));
            let open = own.filter(|(_, cycle)| cycle.archived.is_none());
            for (number, cycle) in open {
                unfinished.extend(result_checks::find_missing_results(&run, *number, cycle));
            }
            if unread.is_empty() {
                let missing = |what: String| LogContradiction {
                    sequence: None,
                    subject: None,
                    description: what,
                };
                findings.extend(unfinished.into_iter().map(missing));
            }
        }
        let caveat = |((agent, why), count): ((String, String), u64)| {
            format!("{count} samples by {agent} count, as the spec accepts, though {why}")
        };
        let declined = |(agent, count): (String, u64)| {
            format!("{agent} declined {count} orders that were not there; that changes nothing")
        };
        let declined = unknown_declines.into_iter().map(declined);
        let caveats = unverified.into_iter().map(caveat).chain(disputed).chain(differing_merges);
        let caveats = caveats.chain(declined).collect();
        let counts = count_run(&run, facts, settled);
        Some(RunAudit { counts, findings, findings_left_out: left_out, caveats })
    }
}

impl AuditCounts {
    fn from_jobs(cycle: &Cycle) -> Self {
        let jobs = || cycle.jobs.values();
        Self {
            planned_samples: jobs().flat_map(|job| &job.draws).map(|d| u64::from(d.count)).sum(),
            accepted_samples: jobs()
                .filter_map(|job| job.samples.as_ref())
                .map(|samples| u64::from(samples.count))
                .sum(),
            set_aside_samples: jobs()
                .filter(|job| job.set_aside.is_some())
                .map(|job| u64::from(job.planned_samples()))
                .sum(),
            judged_samples: jobs()
                .filter_map(|job| job.verdicts.as_ref())
                .map(|verdicts| verdicts.verdicts.len() as u64)
                .sum(),
            ..Self::default()
        }
    }
}

fn count_run(run: &Run, facts: u64, settled: AuditCounts) -> AuditCounts {
    let mut tally = AuditCounts { facts, ..settled };
    for (_, cycle) in run.cycles.range(run.first_cycle..) {
        let jobs = AuditCounts::from_jobs(cycle);
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
