//! Decides the outcome of a run: succeeded, cancelled, stopped by a gate, or failed in a way that
//! retries cannot fix.

use std::collections::{BTreeMap, BTreeSet};

use wire::{AgentId, WorkKind, v1};

use crate::{
    FleetSnapshot,
    cost_probe::count_visit,
    fold::parse_job_id,
    state::{Cycle, PlannedJob, Run},
};

/// Jobs of one cycle in which no job has succeeded; then the run fails.
const SET_ASIDE_JOBS_MAX: usize = 3;

/// After this many in one cycle, an agent counts as unable to do the work.
const FAILED_JOBS_PER_AGENT: usize = 3;

/// Consecutive outer steps of a training without any counted slice after which the run fails.
const EMPTY_OUTER_STEPS_MAX: usize = 3;

/// Consecutive cycles without any kept sample after which the run fails.
const EMPTY_SELECTIONS_MAX: usize = 3;

/// Returns `None` if the run continues. Cancellation takes precedence, then gates, then failures,
/// then regular success.
pub(crate) fn run_outcome(run: &Run, fleet: &FleetSnapshot) -> Option<v1::Done> {
    use v1::done::Status;
    let done = |status: Status, message: String| Some(v1::Done { status: status.into(), message });
    if run.cancelled {
        let why = Some(&run.cancel_reason).filter(|why| !why.is_empty());
        let why = why.map_or(String::new(), |why| format!(": {why}"));
        let user = run.cancelled_by.as_ref().map_or("a user", AgentId::as_str);
        return done(Status::Cancelled, format!("{user} asked for it{why}"));
    }
    if let Some(number) = run.stopped_after() {
        let why = gate_stop_message(run, number);
        return done(
            Status::Succeeded,
            [why, format_shortcomings(run)].join(", ").trim_end_matches(", ").into(),
        );
    }
    if let Some(why) =
        training_failed(run).or_else(|| all_jobs_failing(run, fleet)).or_else(|| keeps_nothing(run))
    {
        return done(Status::Failed, why);
    }
    let finished = (0..=run.last_cycle())
        .all(|number| run.cycles.get(&number).is_some_and(|cycle| cycle.done.is_some()));
    if !finished {
        return None;
    }
    done(Status::Succeeded, format_shortcomings(run))
}

fn gate_stop_message(run: &Run, number: u32) -> String {
    let done = run.cycles.get(&number).and_then(|cycle| cycle.done.as_ref());
    let worst = done.and_then(|done| Some((done.best, done.findings.first()?)));
    let Some((best, finding)) = worst else { return format!("stopped after cycle {number}") };
    let v1::cycle_done::Finding { gate, value, limit, .. } = finding;
    match gate.as_str() {
        "patience" => {
            format!("stopped after cycle {number}: no improvement since cycle {best}")
        }
        _ => format!(
            "stopped after cycle {number}: its {gate} of {value:.4} is past {limit:.4}; cycle \
             {best} was the best"
        ),
    }
}

/// Lists failed evals, samples set aside, cycles that all kept no sample, and a rollback in the last
/// cycle. Empty if nothing is missing.
fn format_shortcomings(run: &Run) -> String {
    let own = || run.cycles.range(run.first_cycle..).map(|(_, cycle)| cycle);
    let unmeasured: usize = own().map(Cycle::missing_eval_count).sum();
    let done = || own().filter_map(|cycle| cycle.done.as_ref());
    let aside: u64 = done().map(|done| u64::from(done.set_aside)).sum();
    let parts = [(unmeasured as u64, "evals failed"), (aside, "samples were set aside")];
    let shortcomings = parts.iter().filter(|(count, _)| *count > 0);
    let mut shortcomings: Vec<String> =
        shortcomings.map(|(count, what)| format!("{count} {what}")).collect();
    let mut kept = own().filter_map(|cycle| cycle.selected.as_ref()).map(|it| it.kept).peekable();
    let is_untrained = kept.peek().is_some() && kept.all(|kept| kept == 0);
    shortcomings
        .extend(is_untrained.then(|| "no cycle kept a sample, so nothing was trained".to_owned()));
    let last = done().next_back().filter(|done| done.then() == v1::gates::Then::RollBack);
    shortcomings.extend(last.map(|done| format!("cycle {} was the best", done.best)));
    shortcomings.join(", ")
}

fn training_failed(run: &Run) -> Option<String> {
    if let Some(failure) = &run.training_failure {
        return Some(format!("train {}: {}", failure.id, failure.message));
    }
    let open = || run.cycles.iter().filter(|(_, cycle)| cycle.done.is_none());
    let contradiction = |(number, cycle): (&u32, _)| training_contradiction(run, *number, cycle);
    if let Some(why) = open().find_map(contradiction) {
        return Some(why);
    }
    let (number, _) =
        open().find(|(_, cycle)| cycle.split_training.is_stuck(EMPTY_OUTER_STEPS_MAX))?;
    Some(format!(
        "the results of {EMPTY_OUTER_STEPS_MAX} outer steps of cycle {number} contradict the log, so \
         none of their slices counts"
    ))
}

/// Returns a message if the training of a cycle is shared among boxes and cannot continue, because one
/// of its facts contradicts the others.
fn training_contradiction(run: &Run, number: u32, cycle: &Cycle) -> Option<String> {
    let why = cycle.split_training.contradiction.as_ref()?;
    let is_shared = run.spec_training().is_some_and(|training| training.across.is_some());
    (is_shared && cycle.final_checkpoint().is_none()).then(|| {
        format!(
            "a fact of the training of cycle {number} contradicts the log ({why}); `flotilla audit \
             {}` names it: submit the run again without the box that wrote it",
            run.id
        )
    })
}

fn all_jobs_failing(run: &Run, fleet: &FleetSnapshot) -> Option<String> {
    let mut open =
        run.cycles.range(run.current_cycle()..).filter(|(_, cycle)| cycle.done.is_none());
    open.find_map(|(number, cycle)| cycle_jobs_failing(run, *number, cycle, fleet))
}

/// Returns a message if all jobs of a purpose were set aside, several were set aside while none
/// succeeded, or all agents fail at the same kind of work.
fn cycle_jobs_failing(
    run: &Run,
    number: u32,
    cycle: &Cycle,
    fleet: &FleetSnapshot,
) -> Option<String> {
    [v1::Purpose::Train, v1::Purpose::Heldout]
        .into_iter()
        .find_map(|purpose| {
            let account = cycle.purpose_index(purpose);
            let count = account.set_aside;
            let all = count > 0 && count == account.job_count();
            let has_result =
                |(_, job): (_, &PlannedJob)| job.verdicts.is_some() || job.scores.is_some();
            let given_up = all
                || (count >= SET_ASIDE_JOBS_MAX
                    && account.finished_count() == 0
                    && !cycle.jobs_for(purpose).any(has_result));
            if !given_up {
                return None;
            }
            let aside = cycle.jobs_for(purpose).filter_map(|(_, job)| job.set_aside.as_ref());
            let last = aside.last()?;
            Some(format!("{count} jobs of cycle {number} were set aside and none done: {last}"))
        })
        .or_else(|| {
            let raft = run.raft_spec();
            let verifies =
                raft.is_some_and(|raft| raft.prompt_sets().any(|set| set.verifier.is_some()));
            let scores = raft.is_some_and(|raft| raft.teacher.is_some());
            // Agents that do work which nobody needs do not end a run by failing at it.
            [(WorkKind::Generate, true), (WorkKind::Verify, verifies), (WorkKind::Score, scores)]
                .into_iter()
                .filter_map(|(kind, is_needed)| is_needed.then_some(kind))
                .find_map(|kind| all_agents_failing(run, number, cycle, fleet, kind))
        })
}

/// Returns a message if every agent of a kind has failed several jobs of the cycle and no job has
/// succeeded.
fn all_agents_failing(
    run: &Run,
    number: u32,
    cycle: &Cycle,
    fleet: &FleetSnapshot,
    kind: WorkKind,
) -> Option<String> {
    let members = fleet.members_for(kind);
    let is_done = |job: &PlannedJob| match kind {
        WorkKind::Generate => job.samples.is_some(),
        WorkKind::Score => job.scores.is_some(),
        _ => job.verdicts.is_some(),
    };
    // The cheap conditions first: this runs for each fact. In a cycle with finished jobs, the scan
    // stops at the first of them.
    if members.is_empty()
        || run.failures.is_empty()
        || cycle.jobs.values().inspect(|_| count_visit()).any(is_done)
    {
        return None;
    }
    let mut failed: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut last = None;
    let failures = run.failures.iter().inspect(|_| count_visit());
    for failure in failures.filter(|failure| failure.kind == kind.as_str()) {
        let is_of_cycle = parse_job_id(&failure.id).is_some_and(|(cycle, _)| cycle == number);
        if is_of_cycle && failure.cause() == v1::failure::Cause::Work {
            failed.entry(&failure.agent).or_default().insert(&failure.id);
            last = Some(failure);
        }
    }
    let tried =
        |agent: &str| failed.get(agent).is_some_and(|jobs| jobs.len() >= FAILED_JOBS_PER_AGENT);
    let last = last.filter(|_| members.iter().all(|member| tried(&member.agent)))?;
    let message = &last.message;
    Some(format!("no agent can {kind} in cycle {number}; {kind} {}: {message}", last.id))
}

/// Returns a message if none of the last [`EMPTY_SELECTIONS_MAX`] cycles kept a sample.
fn keeps_nothing(run: &Run) -> Option<String> {
    let kept = |cycle: &&Cycle| cycle.selected.as_ref().is_some_and(|s| s.kept == 0);
    let own = run.cycles.range(run.first_cycle..).rev().map(|(_, cycle)| cycle);
    let done = own.filter(|cycle| cycle.done.is_some());
    let barren: Vec<&Cycle> = done.take_while(kept).collect();
    let dropped = &barren.first()?.selected.as_ref()?.dropped;
    let why: Vec<String> = dropped.iter().map(|(why, count)| format!("{count} {why}")).collect();
    (barren.len() >= EMPTY_SELECTIONS_MAX).then(|| {
        format!(
            "the last {EMPTY_SELECTIONS_MAX} cycles kept no sample (of the last one: {}); see how \
             they failed: flotilla run explain {}",
            why.join(", "),
            run.id
        )
    })
}
