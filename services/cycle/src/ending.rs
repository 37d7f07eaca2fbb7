//! How a run ends: done, cancelled, or in a way that no further trying would mend.

use std::collections::{BTreeMap, BTreeSet};

use wire::{WorkKind, v1};

use crate::{
    Fleet,
    fold::job_of,
    state::{Cycle, Job, Run},
    visits::visit,
};

/// So many jobs set aside in a cycle while none was done, and the run is hopeless.
const SET_ASIDE_MAX: usize = 3;

/// An agent that failed at so many jobs of a cycle has tried.
const TRIED: usize = 3;

/// So many cycles in a row may keep nothing.
const BARREN_MAX: usize = 3;

/// How the run ends, if it does now.
pub(crate) fn of(run: &Run, fleet: &Fleet) -> Option<v1::Done> {
    use v1::done::Status;
    let done = |status: Status, message: String| Some(v1::Done { status: status.into(), message });
    if run.cancelled {
        return done(Status::Cancelled, "cancelled by a user".into());
    }
    if let Some(number) = run.stopped_after() {
        let why = stopped(run, number);
        return done(
            Status::Succeeded,
            [why, shortcomings(run)].join(", ").trim_end_matches(", ").into(),
        );
    }
    if let Some(why) = untrainable(run).or_else(|| hopeless(run, fleet)).or_else(|| barren(run)) {
        return done(Status::Failed, why);
    }
    let finished = (0..=run.last_cycle())
        .all(|number| run.cycles.get(&number).is_some_and(|cycle| cycle.done.is_some()));
    if !finished {
        return None;
    }
    done(Status::Succeeded, shortcomings(run))
}

/// What the gates ended a run by.
fn stopped(run: &Run, number: u32) -> String {
    let done = run.cycles.get(&number).and_then(|cycle| cycle.done.as_ref());
    let worst = done.and_then(|done| Some((done.best, done.findings.first()?)));
    let Some((best, finding)) = worst else { return format!("stopped after cycle {number}") };
    let v1::cycle_done::Finding { gate, value, limit, .. } = finding;
    match gate.as_str() {
        "patience" => {
            format!("stopped after cycle {number}: none since cycle {best} was better than it")
        }
        _ => format!(
            "stopped after cycle {number}: its {gate} of {value:.4} is past {limit:.4}; cycle \
             {best} was the best"
        ),
    }
}

fn shortcomings(run: &Run) -> String {
    let unmeasured: usize = run.cycles.values().map(Cycle::evals_missing).sum();
    let done = || run.cycles.values().filter_map(|cycle| cycle.done.as_ref());
    let aside: u64 = done().map(|done| u64::from(done.set_aside)).sum();
    let parts = [(unmeasured as u64, "evals failed"), (aside, "samples were set aside")];
    let said = parts.iter().filter(|(count, _)| *count > 0);
    let mut said: Vec<String> = said.map(|(count, what)| format!("{count} {what}")).collect();
    let last = done().next_back().filter(|done| done.then() == v1::gates::Then::RollBack);
    said.extend(last.map(|done| format!("cycle {} was the best", done.best)));
    said.join(", ")
}

fn untrainable(run: &Run) -> Option<String> {
    let failure = run.untrained.as_ref()?;
    Some(format!("train {}: {}", failure.id, failure.message))
}

/// Whether a cycle at work fails at every job it has.
fn hopeless(run: &Run, fleet: &Fleet) -> Option<String> {
    let mut open =
        run.cycles.range(run.current_cycle()..).filter(|(_, cycle)| cycle.done.is_none());
    open.find_map(|(number, cycle)| hopeless_at(run, *number, cycle, fleet))
}

fn hopeless_at(run: &Run, number: u32, cycle: &Cycle, fleet: &Fleet) -> Option<String> {
    [v1::Purpose::Train, v1::Purpose::Heldout]
        .into_iter()
        .find_map(|purpose| {
            let account = cycle.account(purpose);
            let count = account.set_aside;
            let all = count > 0 && count == account.jobs();
            let given_up = all || (account.judged() == 0 && count >= SET_ASIDE_MAX);
            if !given_up {
                return None;
            }
            let aside = cycle.jobs_for(purpose).filter_map(|(_, job)| job.set_aside.as_ref());
            let last = aside.last()?;
            Some(format!("{count} jobs of cycle {number} were set aside and none done: {last}"))
        })
        .or_else(|| {
            [WorkKind::Generate, WorkKind::Verify]
                .into_iter()
                .find_map(|kind| nobody_can(run, number, cycle, fleet, kind))
        })
}

/// Whether everybody there has failed at several jobs of a kind and nobody did one.
fn nobody_can(
    run: &Run,
    number: u32,
    cycle: &Cycle,
    fleet: &Fleet,
    kind: WorkKind,
) -> Option<String> {
    let members = fleet.members(kind);
    let is_done = |job: &Job| match kind {
        WorkKind::Generate => job.samples.is_some(),
        _ => job.verdicts.is_some(),
    };
    // What is asked at every fact first, and of one of the many jobs that are done.
    if members.is_empty()
        || run.failures.is_empty()
        || cycle.jobs.values().inspect(|_| visit()).any(is_done)
    {
        return None;
    }
    let mut failed: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut last = None;
    let failures = run.failures.iter().inspect(|_| visit());
    for failure in failures.filter(|failure| failure.kind == kind.as_str()) {
        let here = job_of(&failure.id).is_some_and(|(cycle, _)| cycle == number);
        if here && failure.cause() == v1::failure::Cause::Work {
            failed.entry(&failure.agent).or_default().insert(&failure.id);
            last = Some(failure);
        }
    }
    let tried = |agent: &str| failed.get(agent).is_some_and(|jobs| jobs.len() >= TRIED);
    let last = last.filter(|_| members.iter().all(|member| tried(&member.agent)))?;
    let message = &last.message;
    Some(format!("nobody there can {kind} in cycle {number}; {kind} {}: {message}", last.id))
}

/// Whether the last cycles kept nothing, each.
fn barren(run: &Run) -> Option<String> {
    let kept = |cycle: &&Cycle| cycle.selected.as_ref().is_some_and(|s| s.kept == 0);
    let done = run.cycles.values().rev().filter(|cycle| cycle.done.is_some());
    let barren: Vec<&Cycle> = done.take_while(kept).collect();
    let dropped = &barren.first()?.selected.as_ref()?.dropped;
    let why: Vec<String> = dropped.iter().map(|(why, count)| format!("{count} {why}")).collect();
    (barren.len() >= BARREN_MAX).then(|| {
        format!(
            "the last {BARREN_MAX} cycles kept no sample (of the last one: {}); easier prompts, \
             more samples a prompt or a lower selection.min_reward may help",
            why.join(", ")
        )
    })
}
