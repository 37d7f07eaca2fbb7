//! Which prompts a cycle samples, and how many samples it draws of each.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
};

use wire::{derive, v1};

use crate::state::Run;

/// What was last seen of a prompt's samples; what is older counts half as much each time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Seen {
    pub judged: f64,
    pub passed: f64,
}

impl Seen {
    pub(crate) fn note(&mut self, judged: u32, passed: u32) {
        const MEMORY: f64 = 0.5;
        self.judged = MEMORY * self.judged + f64::from(judged);
        self.passed = MEMORY * self.passed + f64::from(passed);
    }

    /// The pass rate one would bet on: the mean of what follows from a uniform prior (Laplace's
    /// rule of succession), 0.5 for a prompt never seen.
    pub fn rate(&self) -> f64 {
        (self.passed + 1.0) / (self.judged + 2.0)
    }
}

/// The prompts of a cycle (counted from 1) by line, and how many samples of each; `there` are all
/// prompts of the file.
pub(crate) fn draws(run: &Run, raft: &v1::spec::Raft, cycle: u32, there: u32) -> Vec<(u32, u32)> {
    let seed = run.spec.seed;
    let wanted = match raft.prompts_per_cycle {
        0 => there,
        some => some.min(there),
    };
    let curriculum = raft.curriculum.as_ref();
    let lines = match curriculum.and_then(|curriculum| curriculum.difficulty.as_ref()) {
        Some(difficulty) if wanted < there => by_difficulty(run, difficulty, cycle, wanted, there),
        _ => by_turns(seed, there, wanted, cycle),
    };
    let count = raft.samples_per_prompt;
    match curriculum.and_then(|curriculum| curriculum.budget) {
        Some(budget) => by_uncertainty(run, &budget, cycle, &lines, count),
        None => lines.into_iter().map(|line| (line, count)).collect(),
    }
}

/// Samples of a cycle that a budget is shared out among; more are shared out evenly.
pub const BUDGET_SAMPLES_MAX: u64 = 1 << 22;

/// A seeded sweep through the file that reshuffles each time it comes round.
fn by_turns(seed: u64, all: u32, wanted: u32, cycle: u32) -> Vec<u32> {
    let start = cycle.saturating_sub(1) as usize * wanted as usize;
    let (first_sweep, skip) = (start / all.max(1) as usize, start % all.max(1) as usize);
    // Where a cycle goes on into the next sweep, it passes over what it has already.
    let lines = (first_sweep..=first_sweep + 1).flat_map(|sweep| shuffled(seed, sweep, all));
    let mut chosen = BTreeSet::new();
    for line in lines.skip(skip) {
        if chosen.len() == wanted as usize {
            break;
        }
        chosen.insert(line);
    }
    chosen.into_iter().collect()
}

fn shuffled(seed: u64, sweep: usize, all: u32) -> Vec<u32> {
    let seed = derive(seed, &["sweep", &sweep.to_string()]);
    let mut order: Vec<u32> = (0..all).collect();
    order.sort_by_cached_key(|line| derive(seed, &[&line.to_string()]));
    order
}

/// Some by turns, and of the others those whose pass rate is closest to the target.
fn by_difficulty(
    run: &Run,
    difficulty: &v1::curriculum::Difficulty,
    cycle: u32,
    wanted: u32,
    there: u32,
) -> Vec<u32> {
    let target = crate::schedule::at(&difficulty.target, cycle).unwrap_or(0.5);
    let explored = f64::from(wanted) * difficulty.explore.clamp(0.0, 1.0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a number of prompts"
    )]
    let explored = explored.ceil() as u32;
    let mut chosen: BTreeSet<u32> =
        by_turns(run.spec.seed, there, explored, cycle).into_iter().collect();
    let seed = derive(run.spec.seed, &["difficulty", &cycle.to_string()]);
    let mut others: Vec<(f64, u64, u32)> = (0..there)
        .filter(|line| !chosen.contains(line))
        .map(|line| {
            let distance = (run.seen(line).rate() - target).abs();
            (distance, derive(seed, &[&line.to_string()]), line)
        })
        .collect();
    others.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    let missing = (wanted as usize).saturating_sub(chosen.len());
    chosen.extend(others.into_iter().take(missing).map(|(.., line)| line));
    chosen.into_iter().collect()
}

/// So many samples a prompt on average, each next one where it takes most off the variance of the
/// pass rates' estimates: the exact form of Neyman's allocation (Wright, 2012).
fn by_uncertainty(
    run: &Run,
    budget: &v1::curriculum::Budget,
    cycle: u32,
    lines: &[u32],
    average: u32,
) -> Vec<(u32, u32)> {
    let total = u64::from(average) * lines.len() as u64;
    if total > BUDGET_SAMPLES_MAX {
        return lines.iter().map(|line| (*line, average)).collect();
    }
    let least = budget.min.max(1).min(average);
    let seed = derive(run.spec.seed, &["budget", &cycle.to_string()]);
    let mut counts: BTreeMap<u32, u32> = lines.iter().map(|line| (*line, least)).collect();
    let mut wants: BinaryHeap<Want> = lines
        .iter()
        .map(|line| {
            let rate = run.seen(*line).rate();
            let tie = derive(seed, &[&line.to_string()]);
            Want::new(*line, rate * (1.0 - rate), least, tie)
        })
        .collect();
    let mut left = total - u64::from(least) * lines.len() as u64;
    while left > 0 {
        // Where all have their most, fewer are drawn; the spec's checks do not let it come to that.
        let Some(want) = wants.pop() else { break };
        if want.count >= budget.max.max(average) {
            continue;
        }
        let count = want.count + 1;
        counts.insert(want.line, count);
        wants.push(Want::new(want.line, want.variance, count, want.tie));
        left -= 1;
    }
    counts.into_iter().collect()
}

/// What one more sample of a prompt is worth.
#[derive(Debug, PartialEq)]
struct Want {
    line: u32,
    variance: f64,
    count: u32,
    gain: f64,
    tie: u64,
}

impl Want {
    fn new(line: u32, variance: f64, count: u32, tie: u64) -> Self {
        let gain = variance / (f64::from(count) * (f64::from(count) + 1.0));
        Self { line, variance, count, gain, tie }
    }
}

impl Eq for Want {}

impl Ord for Want {
    fn cmp(&self, other: &Self) -> Ordering {
        self.gain
            .total_cmp(&other.gain)
            .then(self.tie.cmp(&other.tie))
            .then(self.line.cmp(&other.line))
    }
}

impl PartialOrd for Want {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests;
