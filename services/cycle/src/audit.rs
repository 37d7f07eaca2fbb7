//! Re-derives a run from its log alone and says where the log contradicts itself.

use serde::Serialize;
use wire::{Record, v1};

use crate::{
    measure,
    state::{Anomaly, Run},
};

/// What an audit found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Audit {
    pub facts: u64,
    pub planned_samples: u64,
    pub accepted_samples: u64,
    pub judged_samples: u64,
    pub kept_samples: u64,
    /// Planned, and given up with a failure that says why.
    pub set_aside_samples: u64,
    pub checkpoints: u64,
    pub evals: u64,
    /// Each names the fact at fault. Empty for a clean log.
    pub findings: Vec<String>,
}

/// Audits the facts of one run, in log order. `None` when they hold no spec.
pub fn audit<'a>(records: impl IntoIterator<Item = &'a Record>) -> Option<Audit> {
    let mut run: Option<Run> = None;
    let mut facts = 0;
    for record in records {
        facts += 1;
        match &mut run {
            None => run = Run::start(record),
            Some(run) => run.fold(record),
        }
    }
    let run = run?;
    let mut audit = tally(&run, facts);
    audit.findings.extend(run.anomalies.iter().map(|Anomaly { sequence, subject, what }| {
        format!("{subject} (sequence {sequence}): {what}")
    }));
    if run.done.as_ref().is_some_and(|done| done.status() == v1::done::Status::Succeeded) {
        audit.findings.extend(unfinished(&run));
    }
    Some(audit)
}

fn tally(run: &Run, facts: u64) -> Audit {
    let jobs = || run.cycles.values().flat_map(|cycle| cycle.jobs.values());
    let checkpoints = |n: usize| n as u64;
    Audit {
        facts,
        planned_samples: jobs().flat_map(|job| &job.draws).map(|draw| u64::from(draw.count)).sum(),
        accepted_samples: jobs()
            .filter_map(|job| job.samples.as_ref())
            .map(|samples| u64::from(samples.count))
            .sum(),
        judged_samples: jobs()
            .filter_map(|job| job.verdicts.as_ref())
            .map(|verdicts| verdicts.verdicts.len() as u64)
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
        checkpoints: run.cycles.values().map(|cycle| checkpoints(cycle.checkpoints.len())).sum(),
        evals: run.cycles.values().map(|cycle| checkpoints(cycle.evals.len())).sum(),
        findings: Vec::new(),
    }
}

/// What a succeeded run should have and has not.
fn unfinished(run: &Run) -> Vec<String> {
    let mut findings = Vec::new();
    for (number, cycle) in &run.cycles {
        let trained = cycle.final_checkpoint().is_some();
        for (id, job) in &cycle.jobs {
            let expected = trained || job.purpose == v1::Purpose::Train;
            let expected = expected && job.set_aside.is_none();
            if expected && job.samples.is_none() {
                findings.push(format!("cycle {number}, job {id}: planned but never sampled"));
            }
            if expected && job.verdicts.is_none() {
                findings.push(format!("cycle {number}, job {id}: never verified"));
            }
        }
        let summary = measure::summarize(*number, cycle);
        if cycle.done.as_ref().is_some_and(|done| !same_counts(done, &summary)) {
            findings.push(format!("cycle {number}: its summary does not follow from its facts"));
        }
        if !cycle.has_all_evals(&run.spec.suites) {
            findings.push(format!("cycle {number}: a checkpoint was never evaluated"));
        }
    }
    findings
}

/// Times may differ: facts of an earlier attempt can arrive after the summary.
fn same_counts(a: &v1::CycleDone, b: &v1::CycleDone) -> bool {
    (a.sampled, a.kept, &a.heldout, &a.samples_by_agent)
        == (b.sampled, b.kept, &b.heldout, &b.samples_by_agent)
}
