//! Re-issue of orders: lost orders, overdue jobs, and speculative execution of stragglers at the
//! end of a cycle (backup tasks; Dean and Ghemawat, 2004). The first samples fact of a job wins, so
//! an unnecessary order costs compute and nothing else.

use std::collections::BTreeMap;

use wire::{JobId, WorkKind, v1};

use crate::{
    FleetMember, FleetSnapshot,
    command::{PlannerInputs, ReissueTimeouts},
    cost_probe::count_visit,
    fleet::HeldJob,
    state::{Cycle, OrderHistory, PlannedJob, Run},
};

/// Times the expected duration of a job of its size.
const OVERDUE_FACTOR: f64 = 8.0;

/// Times the expected duration of one of a cycle's last jobs, scaled by the slowdown of the agent
/// that holds it. Beyond that the job is stuck and is also given to an idle agent.
const STRAGGLER_FACTOR: f64 = 1.5;

/// Minimum ratio of the holder's remaining time to an idle agent's time. Rates are estimates, and
/// duplicated sampling costs energy.
const STRAGGLER_GAIN_MIN: f64 = 1.5;
/// Minimum time that a backup order must save.
const STRAGGLER_GAIN_MIN_S: f64 = 1.0;

/// One of the last jobs without a known holder for this time counts as held by an agent that
/// stopped responding.
const STRAGGLER_UNCLAIMED_MS: u64 = 6_000;

/// Orders of one job. Each re-issue doubles the wait before the next one.
const ORDERS_PER_ROUND_MAX: u32 = 8;

/// Orders of one job in one round; then straggler checks add no further backup orders.
const STRAGGLER_ORDERS_MAX: u32 = 2;

pub(crate) struct BackupOrder<'a> {
    pub(crate) id: &'a JobId,
    pub(crate) job: &'a PlannedJob,
    /// The idle agent that is to take the order; `None` if any may.
    pub(crate) agent: Option<&'a FleetMember>,
}

/// Returns the in-flight jobs of one purpose to order again.
///
/// Three cases, in this order of precedence:
///
/// 1. lost: no agent has held the job for `timeouts.unclaimed_ms` while one is idle;
/// 2. overdue: the job has taken [`OVERDUE_FACTOR`] times its expected duration;
/// 3. straggler: all jobs of the purpose are ordered, and an idle agent would clearly finish this
///    one before its holder.
///
/// Lost and overdue jobs are limited to one per idle generator; stragglers are considered only
/// without any of them. Returns nothing if `inputs.check_stragglers` is false or no generator is
/// idle.
pub(crate) fn backup_orders<'a>(
    run: &Run,
    number: u32,
    cycle: &'a Cycle,
    purpose: v1::Purpose,
    inputs: PlannerInputs<'a>,
) -> Vec<BackupOrder<'a>> {
    if !inputs.check_stragglers {
        return Vec::new();
    }
    let account = cycle.purpose_index(purpose);
    let tail = account.unordered.is_empty();
    let idle = IdleGenerators::from_fleet(inputs.fleet);
    if idle.generator_count() == 0 {
        return Vec::new();
    }
    let sample_ms = account.ms_per_sample();
    let holders = index_holders(inputs.fleet);
    let mut slow: Vec<(f64, &JobId, &PlannedJob)> = Vec::new();
    let mut again = Vec::new();
    for (id, job) in account.in_flight.iter().filter_map(|id| cycle.jobs.get_key_value(id)) {
        count_visit();
        let waited = inputs.now_ms.saturating_sub(job.orders.last_ordered_ms);
        let held = HeldJob { run: run.id.clone(), cycle: number, job: id.to_string() };
        let expected = sample_ms.map(|ms| ms * f64::from(job.planned_samples()));
        let more = tail && job.orders.orders_in_round < STRAGGLER_ORDERS_MAX;
        let Some(holder) = holders.get(&held) else {
            let unheld = inputs.fleet.unclaimed_ms(WorkKind::Generate, &held, waited);
            if is_lost(&job.orders, unheld, inputs.timeouts) {
                again.push(BackupOrder { id, job, agent: None });
            } else if more && unheld >= STRAGGLER_UNCLAIMED_MS {
                slow.push((f64::INFINITY, id, job));
            }
            continue;
        };
        if expected.is_some_and(|ms| is_overdue(&job.orders, waited, ms, inputs.timeouts)) {
            again.push(BackupOrder { id, job, agent: None });
            continue;
        }
        let stuck = expected.is_some_and(|expected| {
            to_f64_ms(waited) > STRAGGLER_FACTOR * expected * slowdown_factor(inputs.fleet, holder)
        });
        let left_s = account.tokens_per_sample().and_then(|tokens| holder.remaining_s(tokens));
        let left_s = if stuck { Some(f64::INFINITY) } else { left_s };
        slow.extend(left_s.filter(|_| more).map(|left_s| (left_s, id, job)));
    }
    again.truncate(idle.generator_count());
    if again.is_empty() {
        again = idle.assign_stragglers(slow, account.tokens_per_sample().unwrap_or(0.0));
    }
    again
}

/// Returns true if work of a trainer is to be ordered: once per round, and again if no trainer holds
/// it although one is idle.
pub(crate) fn is_training_due(
    run: &Run,
    cycle: u32,
    job: &str,
    ordered: &OrderHistory,
    inputs: PlannerInputs<'_>,
) -> bool {
    // An order may be of a later round, if the log has lost the resume before it.
    if ordered.round < run.round {
        return true;
    }
    let held = HeldJob { run: run.id.clone(), cycle, job: job.to_owned() };
    let waited = inputs.now_ms.saturating_sub(ordered.last_ordered_ms);
    inputs.fleet.idle_count(WorkKind::Train) > 0
        && !inputs.fleet.is_held(WorkKind::Train, &held)
        && is_lost(
            ordered,
            inputs.fleet.unclaimed_ms(WorkKind::Train, &held, waited),
            inputs.timeouts,
        )
}

fn index_holders(fleet: &FleetSnapshot) -> BTreeMap<&HeldJob, &FleetMember> {
    let mut holders = BTreeMap::new();
    for member in &fleet.generators {
        holders.extend(member.held_jobs.iter().map(|held| (held, member)));
    }
    holders
}

struct IdleGenerators<'a> {
    /// Known speed, fastest first, each with the tokens assigned to it so far.
    measured: Vec<(&'a FleetMember, f64)>,
    unmeasured: usize,
}

impl<'a> IdleGenerators<'a> {
    fn from_fleet(fleet: &'a FleetSnapshot) -> Self {
        let idle = fleet.generators.iter().filter(|member| member.held_jobs.is_empty());
        let (known, others): (Vec<_>, Vec<_>) = idle.partition(|member| member.tokens_per_s > 0.0);
        let mut measured: Vec<_> = known.into_iter().map(|member| (member, 0.0)).collect();
        measured.sort_by(|(a, _), (b, _)| b.tokens_per_s.total_cmp(&a.tokens_per_s));
        Self { measured, unmeasured: others.len() }
    }

    fn generator_count(&self) -> usize {
        self.measured.len() + self.unmeasured
    }

    /// Assigns the slowest jobs to idle generators that would finish them clearly sooner.
    ///
    /// `slow` holds each job with the seconds its holder still needs; infinity means unknown or
    /// stuck. Such a job is assigned only to a generator without any other assignment, or to one of
    /// unknown speed.
    fn assign_stragglers(
        mut self,
        mut slow: Vec<(f64, &'a JobId, &'a PlannedJob)>,
        tokens_per_sample: f64,
    ) -> Vec<BackupOrder<'a>> {
        slow.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
        let mut given = Vec::new();
        for (left_s, id, job) in slow {
            let tokens = f64::from(job.planned_samples()) * tokens_per_sample;
            let better = self.measured.iter_mut().find(|(member, before)| {
                let done_s = member.duration_s(*before + tokens);
                match left_s.is_finite() {
                    true => {
                        left_s > (STRAGGLER_GAIN_MIN * done_s).max(done_s + STRAGGLER_GAIN_MIN_S)
                    }
                    false => *before == 0.0,
                }
            });
            if let Some((member, before)) = better {
                *before += tokens;
                given.push(BackupOrder { id, job, agent: Some(member) });
            } else if self.unmeasured > 0 && left_s.is_infinite() {
                self.unmeasured -= 1;
                given.push(BackupOrder { id, job, agent: None });
            }
        }
        given
    }
}

/// Compares with the fleet's average; at least 1.
fn slowdown_factor(fleet: &FleetSnapshot, member: &FleetMember) -> f64 {
    let rates = || fleet.generators.iter().map(|other| other.tokens_per_s).filter(|r| *r > 0.0);
    let count = f64::from(u32::try_from(rates().count()).unwrap_or(u32::MAX));
    let times = rates().sum::<f64>() / count / member.tokens_per_s;
    if times.is_finite() { times.max(1.0) } else { 1.0 }
}

/// Returns true once the order has been unclaimed for longer than its timeout, which doubles with
/// each order of the round.
pub(crate) fn is_lost(ordered: &OrderHistory, unheld_ms: u64, waiting: &ReissueTimeouts) -> bool {
    let tries = ordered.orders_in_round.clamp(1, ORDERS_PER_ROUND_MAX);
    ordered.orders_in_round < ORDERS_PER_ROUND_MAX
        && unheld_ms >= waiting.unclaimed_ms << (tries - 1)
}

/// Returns true once the order has been out for [`OVERDUE_FACTOR`] times the expected duration and
/// for at least `overdue_ms`; both limits double with each order of the round.
fn is_overdue(
    ordered: &OrderHistory,
    waited_ms: u64,
    expected_ms: f64,
    waiting: &ReissueTimeouts,
) -> bool {
    let tries = ordered.orders_in_round.clamp(1, ORDERS_PER_ROUND_MAX);
    let limit = (OVERDUE_FACTOR * expected_ms).max(to_f64_ms(waiting.overdue_ms));
    ordered.orders_in_round < ORDERS_PER_ROUND_MAX
        && to_f64_ms(waited_ms) > limit * f64::from(1 << (tries - 1))
}

#[expect(clippy::cast_precision_loss, reason = "a wait of under 100 000 years")]
fn to_f64_ms(milliseconds: u64) -> f64 {
    milliseconds as f64
}

#[cfg(test)]
mod tests;
