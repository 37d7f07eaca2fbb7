//! What is ordered once more: an order nobody holds, one that takes too long, and the
//! last ones of a cycle while boxes stand idle (backup tasks; Dean and Ghemawat, 2004).
//!
//! The first samples fact of a job wins, so a needless order costs work and nothing else.

use wire::{JobId, WorkKind, v1};

use crate::{
    decide::Inputs,
    fleet::Held,
    state::{Cycle, Job, Ordered, Run},
};

/// When an order is written again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// An order that no agent has held for so long while one stood idle is lost. Longer than
    /// a lease: what a dead agent held comes back by itself.
    pub unheld_ms: u64,
    /// No job is overdue before.
    pub overdue_ms: u64,
}

impl Default for Waiting {
    fn default() -> Self {
        Self { unheld_ms: 90_000, overdue_ms: 60_000 }
    }
}

/// A job is overdue after so many times what jobs of its size take.
const OVERDUE_TIMES: f64 = 8.0;

/// The last jobs are given to idle boxes as well, after so many times what they take.
const TAIL_TIMES: f64 = 1.5;

/// Orders of one job in one round: those who wait longer each time.
const ORDERS_MAX: u32 = 8;

/// Orders of a job that are out only because boxes stand idle.
const TAIL_ORDERS_MAX: u32 = 2;

/// The open jobs of this purpose to order once more; all of them are ordered already.
pub(crate) fn jobs<'a>(
    run: &Run,
    number: u32,
    cycle: &'a Cycle,
    purpose: v1::Purpose,
    inputs: Inputs<'_>,
) -> Vec<(&'a JobId, &'a Job)> {
    let idle = inputs.fleet.idle(WorkKind::Generate);
    if idle == 0 {
        return Vec::new();
    }
    let sample_ms = milliseconds_a_sample(cycle, purpose);
    let all_out = cycle.jobs_for(purpose).all(|(_, job)| is_out(run, job) || !job.needs_samples());
    let mut slow: Vec<(u64, &JobId, &Job)> = Vec::new();
    let mut again = Vec::new();
    for (id, job) in cycle.jobs_for(purpose).filter(|(_, job)| is_out(run, job)) {
        let waited = inputs.now_ms.saturating_sub(job.ordered.at_ms);
        let held = Held { run: run.id.clone(), cycle: number, job: id.to_string() };
        let expected = sample_ms.map(|ms| ms * f64::from(job.planned()));
        if !inputs.fleet.holds(WorkKind::Generate, &held) {
            let unheld = inputs.fleet.unheld_ms(WorkKind::Generate, &held, waited);
            if is_lost(&job.ordered, unheld, inputs.waiting) {
                again.push((id, job));
            }
        } else if expected.is_some_and(|ms| is_overdue(&job.ordered, waited, ms, inputs.waiting)) {
            again.push((id, job));
        } else if all_out
            && job.ordered.in_round < TAIL_ORDERS_MAX
            && expected.is_some_and(|expected| ms(waited) > TAIL_TIMES * expected)
        {
            slow.push((waited, id, job));
        }
    }
    slow.sort_by_key(|(waited, ..)| std::cmp::Reverse(*waited));
    again.extend(slow.into_iter().map(|(_, id, job)| (id, job)));
    again.truncate(idle);
    again
}

/// Whether an order was written that nobody has held for long, though somebody could.
pub(crate) fn is_lost(ordered: &Ordered, unheld_ms: u64, waiting: &Waiting) -> bool {
    let tries = ordered.in_round.clamp(1, ORDERS_MAX);
    ordered.in_round < ORDERS_MAX && unheld_ms >= waiting.unheld_ms << (tries - 1)
}

fn is_overdue(ordered: &Ordered, waited_ms: u64, expected_ms: f64, waiting: &Waiting) -> bool {
    let tries = ordered.in_round.clamp(1, ORDERS_MAX);
    let limit = (OVERDUE_TIMES * expected_ms).max(ms(waiting.overdue_ms));
    ordered.in_round < ORDERS_MAX && ms(waited_ms) > limit * f64::from(1 << (tries - 1))
}

fn is_out(run: &Run, job: &Job) -> bool {
    job.needs_samples() && job.ordered.round == run.round
}

/// What a sample took in the jobs that are done, the middle one of them.
fn milliseconds_a_sample(cycle: &Cycle, purpose: v1::Purpose) -> Option<f64> {
    let done = cycle.jobs_for(purpose).filter_map(|(_, job)| job.samples.as_ref());
    let mut each: Vec<f64> = done
        .filter(|samples| samples.wall_s.is_finite() && samples.wall_s >= 0.0)
        .map(|samples| 1000.0 * samples.wall_s / f64::from(samples.count.max(1)))
        .collect();
    each.sort_by(f64::total_cmp);
    each.get(each.len() / 2).copied()
}

#[expect(clippy::cast_precision_loss, reason = "a wait of under 100 000 years")]
fn ms(milliseconds: u64) -> f64 {
    milliseconds as f64
}
