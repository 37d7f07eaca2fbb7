//! Settings that change from cycle to cycle.

use wire::{derive, v1};

use crate::state::Run;

/// The value of a cycle (counted from 1): the last one stays. `None` for an empty list.
pub fn at(values: &[f64], cycle: u32) -> Option<f64> {
    let place = cycle.saturating_sub(1) as usize;
    values.get(place).or(values.last()).copied()
}

/// The training a cycle orders.
pub(crate) fn training(raft: &v1::spec::Raft, cycle: u32) -> Option<v1::Training> {
    let mut training = raft.training.clone()?;
    let rates = raft.schedules.as_ref().map_or(&[][..], |all| &all.learning_rate);
    training.learning_rate = at(rates, cycle).unwrap_or(training.learning_rate);
    Some(training)
}

/// How a cycle samples a set of prompts. Held-out samples are drawn alike in every cycle, so that
/// cycles compare.
pub fn sampling(
    raft: &v1::spec::Raft,
    cycle: u32,
    purpose: v1::Purpose,
    suite: &str,
) -> Option<v1::Sampling> {
    let mut sampling = raft.prompt_set(purpose, suite)?.sampling?;
    let temperatures = raft.schedules.as_ref().map_or(&[][..], |all| &all.temperature);
    if purpose != v1::Purpose::Heldout {
        sampling.temperature = at(temperatures, cycle).unwrap_or(sampling.temperature);
    }
    Some(sampling)
}

/// Whether an order's samples are to tell their logprob though it costs time: those that are
/// trained on, where the spec asks for their entropy.
pub(crate) fn logprobs(raft: &v1::spec::Raft, purpose: v1::Purpose) -> bool {
    raft.entropy && purpose != v1::Purpose::Heldout
}

/// Rewards differ by more than one in so many.
const GRID: f64 = 1e9;

/// What the seeds of a cycle's samples are derived from. Held-out ones are drawn alike in every
/// cycle, so that cycles compare; prompts of two suites may have the same id.
pub fn generate_seed(seed: u64, cycle: u32, purpose: v1::Purpose, suite: &str) -> u64 {
    match purpose {
        v1::Purpose::Heldout if suite.is_empty() => derive(seed, &["generate", "heldout"]),
        v1::Purpose::Heldout => derive(seed, &["generate", "heldout", suite]),
        v1::Purpose::Train | v1::Purpose::Unspecified => {
            derive(seed, &["generate", &cycle.to_string()])
        }
    }
}

/// The least reward of a cycle, by what became of the cycle before.
pub(crate) fn adapt(run: &Run, cycle: u32, adaptive: &v1::selection::Adaptive, first: f64) -> f64 {
    let before = run.cycles.range(..cycle).rev().find_map(|(_, cycle)| cycle.selected.as_ref());
    let next = before.map_or(first, |before| {
        let judged: u64 = before.judged.iter().copied().map(u64::from).sum();
        let passed: u64 = before.passed.iter().copied().map(u64::from).sum();
        match share(passed, judged) {
            Some(share) if share > adaptive.target => before.min_reward + adaptive.step,
            Some(share) if share < adaptive.target => before.min_reward - adaptive.step,
            _ => before.min_reward,
        }
    });
    // Steps add up in binary: 0.1 and twice 0.1 must reach a reward of 0.3.
    let next = (next * GRID).round() / GRID;
    // Not `clamp`, which panics on a spec that nobody checked.
    next.min(adaptive.high).max(adaptive.low)
}

#[expect(clippy::cast_precision_loss, reason = "far fewer samples than 2^52")]
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_of_a_schedule_stays() {
        let values = [3.0, 2.0, 1.0];
        let found: Vec<_> = (0..6).map(|cycle| at(&values, cycle)).collect();
        let expected = [3.0, 3.0, 2.0, 1.0, 1.0, 1.0].map(Some);
        assert_eq!(found, expected, "cycle 0 samples as the first cycle would");
        assert_eq!(at(&[], 1), None);
    }
}
