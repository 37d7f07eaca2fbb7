//! What is ordered once more: an order nobody holds, one that takes too long, and the
//! last ones of a cycle while boxes stand idle (backup tasks; Dean and Ghemawat, 2004).
//!
//! The first samples fact of a job wins, so a needless order costs work and nothing else.

use std::collections::BTreeMap;

use wire::{JobId, WorkKind, v1};

use crate::{
    Fleet, Member,
    decide::Inputs,
    fleet::Held,
    state::{Cycle, Job, Ordered, Run},
    visits::visit,
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

/// … or as soon as one would be done with them this much sooner than whoever holds them, and by so
/// many seconds: rates are estimates, and what is drawn twice costs energy.
const TAIL_GAIN: f64 = 1.5;
const TAIL_GAIN_S: f64 = 1.0;

/// The last jobs that nobody was seen to hold for so long are held by a box that fell silent.
const TAIL_UNHELD_MS: u64 = 6_000;

/// Orders of one job in one round: those who wait longer each time.
const ORDERS_MAX: u32 = 8;

/// Orders of a job that are out only because boxes stand idle.
const TAIL_ORDERS_MAX: u32 = 2;

/// A job to order once more, and the speed of the box that it is meant for; 0 where it is meant for
/// any.
pub(crate) struct Again<'a> {
    pub(crate) id: &'a JobId,
    pub(crate) job: &'a Job,
    pub(crate) tokens_per_s: f64,
}

/// The open jobs of this purpose to order once more; all of them are ordered already.
pub(crate) fn jobs<'a>(
    run: &Run,
    number: u32,
    cycle: &'a Cycle,
    purpose: v1::Purpose,
    inputs: Inputs<'_>,
) -> Vec<Again<'a>> {
    if !inputs.again {
        return Vec::new();
    }
    let account = cycle.account(purpose);
    let tail = account.unordered.is_empty();
    let idle = Idle::of(inputs.fleet);
    if idle.boxes() == 0 {
        return Vec::new();
    }
    let sample_ms = account.milliseconds_a_sample();
    let holders = holders(inputs.fleet);
    let mut slow: Vec<(f64, &JobId, &Job)> = Vec::new();
    let mut again = Vec::new();
    for (id, job) in account.out.iter().filter_map(|id| cycle.jobs.get_key_value(id)) {
        visit();
        let waited = inputs.now_ms.saturating_sub(job.ordered.at_ms);
        let held = Held { run: run.id.clone(), cycle: number, job: id.to_string() };
        let expected = sample_ms.map(|ms| ms * f64::from(job.planned()));
        let more = tail && job.ordered.in_round < TAIL_ORDERS_MAX;
        let Some(holder) = holders.get(&held) else {
            let unheld = inputs.fleet.unheld_ms(WorkKind::Generate, &held, waited);
            if is_lost(&job.ordered, unheld, inputs.waiting) {
                again.push(Again { id, job, tokens_per_s: 0.0 });
            } else if more && unheld >= TAIL_UNHELD_MS {
                slow.push((f64::INFINITY, id, job));
            }
            continue;
        };
        if expected.is_some_and(|ms| is_overdue(&job.ordered, waited, ms, inputs.waiting)) {
            again.push(Again { id, job, tokens_per_s: 0.0 });
            continue;
        }
        let stuck = expected.is_some_and(|expected| {
            ms(waited) > TAIL_TIMES * expected * slower(inputs.fleet, holder)
        });
        let left_s = account.tokens_a_sample().and_then(|tokens| holder.left_s(tokens));
        let left_s = if stuck { Some(f64::INFINITY) } else { left_s };
        slow.extend(left_s.filter(|_| more).map(|left_s| (left_s, id, job)));
    }
    again.truncate(idle.boxes());
    if again.is_empty() {
        again = idle.share_out(slow, account.tokens_a_sample().unwrap_or(0.0));
    }
    again
}

/// Who holds what.
fn holders(fleet: &Fleet) -> BTreeMap<&Held, &Member> {
    let mut holders = BTreeMap::new();
    for member in &fleet.generators {
        holders.extend(member.holds.iter().map(|held| (held, member)));
    }
    holders
}

/// The boxes that stand idle.
struct Idle<'a> {
    /// Those that know their speed, fastest first, each with the tokens it is given.
    known: Vec<(&'a Member, f64)>,
    unknown: usize,
}

impl<'a> Idle<'a> {
    fn of(fleet: &'a Fleet) -> Self {
        let idle = fleet.generators.iter().filter(|member| member.holds.is_empty());
        let (known, others): (Vec<_>, Vec<_>) = idle.partition(|member| member.tokens_per_s > 0.0);
        let mut known: Vec<_> = known.into_iter().map(|member| (member, 0.0)).collect();
        known.sort_by(|(a, _), (b, _)| b.tokens_per_s.total_cmp(&a.tokens_per_s));
        Self { known, unknown: others.len() }
    }

    fn boxes(&self) -> usize {
        self.known.len() + self.unknown
    }

    /// Of jobs, each with what it would still take, those that a box would do sooner, and how fast
    /// that one is. A job that nobody can say this of has an idle box to itself.
    fn share_out<'b>(
        mut self,
        mut slow: Vec<(f64, &'b JobId, &'b Job)>,
        tokens_a_sample: f64,
    ) -> Vec<Again<'b>> {
        slow.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
        let mut given = Vec::new();
        for (left_s, id, job) in slow {
            let tokens = f64::from(job.planned()) * tokens_a_sample;
            let better = self.known.iter_mut().find(|(member, before)| {
                let done_s = member.takes_s(*before + tokens);
                match left_s.is_finite() {
                    true => left_s > (TAIL_GAIN * done_s).max(done_s + TAIL_GAIN_S),
                    false => *before == 0.0,
                }
            });
            if let Some((member, before)) = better {
                *before += tokens;
                given.push(Again { id, job, tokens_per_s: member.tokens_per_s });
            } else if self.unknown > 0 && left_s.is_infinite() {
                self.unknown -= 1;
                given.push(Again { id, job, tokens_per_s: 0.0 });
            }
        }
        given
    }
}

/// How many times slower a box is than the average, at least once.
fn slower(fleet: &Fleet, member: &Member) -> f64 {
    let rates = || fleet.generators.iter().map(|other| other.tokens_per_s).filter(|r| *r > 0.0);
    let count = f64::from(u32::try_from(rates().count()).unwrap_or(u32::MAX));
    let times = rates().sum::<f64>() / count / member.tokens_per_s;
    if times.is_finite() { times.max(1.0) } else { 1.0 }
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

#[expect(clippy::cast_precision_loss, reason = "a wait of under 100 000 years")]
fn ms(milliseconds: u64) -> f64 {
    milliseconds as f64
}
