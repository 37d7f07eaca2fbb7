//! Selects the prompts of a cycle and the number of samples of each.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
};

use wire::{derive_seed, v1};

use crate::state::Run;

/// Returns the lines of a cycle's prompts (cycles count from 1), each with its number of samples.
/// `prompt_count` is that of the file.
pub(crate) fn select_prompts(
    run: &Run,
    raft: &v1::spec::Raft,
    cycle: u32,
    prompt_count: u32,
) -> Vec<(u32, u32)> {
    let seed = run.spec.seed;
    let wanted = match raft.prompts_per_cycle {
        0 => prompt_count,
        some => some.min(prompt_count),
    };
    let curriculum = raft.curriculum.as_ref();
    let lines = match curriculum.and_then(|curriculum| curriculum.difficulty.as_ref()) {
        Some(difficulty) if wanted < prompt_count => {
            select_by_difficulty(run, difficulty, cycle, wanted, prompt_count)
        }
        _ => select_in_shuffled_passes(seed, prompt_count, wanted, cycle),
    };
    let count = raft.samples_per_prompt;
    match curriculum.and_then(|curriculum| curriculum.budget) {
        Some(budget) => allocate_budget(run, &budget, cycle, &lines, count),
        None => lines.into_iter().map(|line| (line, count)).collect(),
    }
}

/// Largest number of samples of a cycle that a budget allocates by uncertainty; larger cycles are
/// allocated evenly.
pub const BUDGET_SAMPLES_MAX: u64 = 1 << 22;

/// Selects in passes through the file, each in a new seeded order.
fn select_in_shuffled_passes(seed: u64, all: u32, wanted: u32, cycle: u32) -> Vec<u32> {
    let start = cycle.saturating_sub(1) as usize * wanted as usize;
    let (first_pass, skip) = (start / all.max(1) as usize, start % all.max(1) as usize);
    // A cycle that continues into the next pass skips the prompts it already has.
    let lines = (first_pass..=first_pass + 1).flat_map(|pass| shuffle_lines(seed, pass, all));
    let mut chosen = BTreeSet::new();
    for line in lines.skip(skip) {
        if chosen.len() == wanted as usize {
            break;
        }
        chosen.insert(line);
    }
    chosen.into_iter().collect()
}

fn shuffle_lines(seed: u64, pass: usize, all: u32) -> Vec<u32> {
    let seed = derive_seed(seed, &["sweep", &pass.to_string()]);
    let mut order: Vec<u32> = (0..all).collect();
    order.sort_by_cached_key(|line| derive_seed(seed, &[&line.to_string()]));
    order
}

/// Selects a share in shuffled passes, and fills up with the prompts whose expected pass rate is
/// closest to the target.
fn select_by_difficulty(
    run: &Run,
    difficulty: &v1::curriculum::Difficulty,
    cycle: u32,
    wanted: u32,
    prompt_count: u32,
) -> Vec<u32> {
    let target = crate::schedule::scheduled_value(&difficulty.target, cycle).unwrap_or(0.5);
    let explored = f64::from(wanted) * difficulty.explore.clamp(0.0, 1.0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a number of prompts"
    )]
    let explored = explored.ceil() as u32;
    let mut chosen: BTreeSet<u32> =
        select_in_shuffled_passes(run.spec.seed, prompt_count, explored, cycle)
            .into_iter()
            .collect();
    let seed = derive_seed(run.spec.seed, &["difficulty", &cycle.to_string()]);
    let mut others: Vec<(f64, u64, u32)> = (0..prompt_count)
        .filter(|line| !chosen.contains(line))
        .map(|line| {
            let distance = (run.prompt_history(line).expected_pass_rate() - target).abs();
            (distance, derive_seed(seed, &[&line.to_string()]), line)
        })
        .collect();
    others.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    let missing = (wanted as usize).saturating_sub(chosen.len());
    chosen.extend(others.into_iter().take(missing).map(|(.., line)| line));
    chosen.into_iter().collect()
}

/// Allocates a budget of `average` samples per prompt: each next sample goes to the prompt where it
/// reduces the variance of the estimated pass rates most (exact form of Neyman's allocation;
/// Wright, 2012).
fn allocate_budget(
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
    let seed = derive_seed(run.spec.seed, &["budget", &cycle.to_string()]);
    let mut counts: BTreeMap<u32, u32> = lines.iter().map(|line| (*line, least)).collect();
    let mut gains: BinaryHeap<SampleGain> = lines
        .iter()
        .map(|line| {
            let rate = run.prompt_history(*line).expected_pass_rate();
            let tie_break = derive_seed(seed, &[&line.to_string()]);
            SampleGain::new(*line, rate * (1.0 - rate), least, tie_break)
        })
        .collect();
    let mut left = total - u64::from(least) * lines.len() as u64;
    while left > 0 {
        // If all prompts have reached their maximum, fewer samples are drawn; the checks of the
        // spec prevent this.
        let Some(best) = gains.pop() else { break };
        if best.count >= budget.max.max(average) {
            continue;
        }
        let count = best.count + 1;
        counts.insert(best.line, count);
        gains.push(SampleGain::new(best.line, best.variance, count, best.tie_break));
        left -= 1;
    }
    counts.into_iter().collect()
}

/// The value of one more sample of a prompt; ordered for the heap.
#[derive(Debug, PartialEq)]
struct SampleGain {
    line: u32,
    variance: f64,
    count: u32,
    gain: f64,
    tie_break: u64,
}

impl SampleGain {
    fn new(line: u32, variance: f64, count: u32, tie_break: u64) -> Self {
        let gain = variance / (f64::from(count) * (f64::from(count) + 1.0));
        Self { line, variance, count, gain, tie_break }
    }
}

impl Eq for SampleGain {}

impl Ord for SampleGain {
    fn cmp(&self, other: &Self) -> Ordering {
        self.gain
            .total_cmp(&other.gain)
            .then(self.tie_break.cmp(&other.tie_break))
            .then(self.line.cmp(&other.line))
    }
}

impl PartialOrd for SampleGain {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests;
