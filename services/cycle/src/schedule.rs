//! Settings that change from cycle to cycle.

use wire::{derive_seed, v1};

use crate::state::Run;

/// Returns the value of a schedule in a cycle (counted from 1): `values[cycle - 1]`, or the last
/// value in later cycles. `None` for an empty list.
pub fn scheduled_value(values: &[f64], cycle: u32) -> Option<f64> {
    let place = cycle.saturating_sub(1) as usize;
    values.get(place).or(values.last()).copied()
}

pub(crate) fn training_settings(raft: &v1::spec::Raft, cycle: u32) -> Option<v1::Training> {
    let mut training = raft.training.clone()?;
    let rates = raft.schedules.as_ref().map_or(&[][..], |all| &all.learning_rate);
    training.learning_rate = scheduled_value(rates, cycle).unwrap_or(training.learning_rate);
    Some(training)
}

/// Returns the sampling settings of a cycle for the prompt set of a purpose and suite (empty for
/// the run's own prompts); `None` if the spec has no such set. The temperature of training samples
/// follows its schedule; held-out samples use the same settings in each cycle, so that cycles can
/// be compared.
pub fn sampling_settings(
    raft: &v1::spec::Raft,
    cycle: u32,
    purpose: v1::Purpose,
    suite: &str,
) -> Option<v1::Sampling> {
    let mut sampling = raft.find_prompt_set(purpose, suite)?.sampling?;
    let temperatures = raft.schedules.as_ref().map_or(&[][..], |all| &all.temperature);
    if purpose != v1::Purpose::Heldout {
        sampling.temperature = scheduled_value(temperatures, cycle).unwrap_or(sampling.temperature);
    }
    Some(sampling)
}

/// Returns true for training samples of a spec that asks for entropy. Log-probabilities cost time.
pub(crate) fn needs_logprobs(raft: &v1::spec::Raft, purpose: v1::Purpose) -> bool {
    raft.entropy && purpose != v1::Purpose::Heldout
}

/// Returns true for training samples of a spec that asks for the log-probability of each token.
pub(crate) fn needs_token_logprobs(raft: &v1::spec::Raft, purpose: v1::Purpose) -> bool {
    raft.token_logprobs && purpose != v1::Purpose::Heldout
}

/// Returns true for samples of prompts whose verifier is an environment.
pub(crate) fn plays_episodes(raft: &v1::spec::Raft, purpose: v1::Purpose, suite: &str) -> bool {
    let set = raft.find_prompt_set(purpose, suite);
    set.and_then(|set| set.verifier).is_some_and(|verifier| verifier.environment().is_some())
}

/// Rewards are rounded to multiples of 1 / this.
const REWARD_STEPS: f64 = 1e9;

/// Derives the seed of a job's samples from the run's seed. Training samples have another seed in
/// each cycle. Held-out samples have one for each suite, because prompts of two suites may have the
/// same id, but the same in each cycle, so that cycles can be compared.
pub fn generate_seed(seed: u64, cycle: u32, purpose: v1::Purpose, suite: &str) -> u64 {
    match purpose {
        v1::Purpose::Heldout if suite.is_empty() => derive_seed(seed, &["generate", "heldout"]),
        v1::Purpose::Heldout => derive_seed(seed, &["generate", "heldout", suite]),
        v1::Purpose::Train | v1::Purpose::Unspecified => {
            derive_seed(seed, &["generate", &cycle.to_string()])
        }
    }
}

/// Returns the minimum reward of the previous selection, one step up if more than the target share
/// passed, one step down if less did, within the bounds of the spec.
pub(crate) fn adaptive_min_reward(
    run: &Run,
    cycle: u32,
    adaptive: &v1::selection::Adaptive,
    first: f64,
) -> f64 {
    let before = run.cycles.range(..cycle).rev().find_map(|(_, cycle)| cycle.selected.as_ref());
    let next = before.map_or(first, |before| {
        let judged: u64 = before.judged.iter().copied().map(u64::from).sum();
        let passed: u64 = before.passed.iter().copied().map(u64::from).sum();
        match ratio_of(passed, judged) {
            Some(share) if share > adaptive.target => before.min_reward + adaptive.step,
            Some(share) if share < adaptive.target => before.min_reward - adaptive.step,
            _ => before.min_reward,
        }
    });
    // Binary fractions accumulate errors: 0.1 plus two steps of 0.1 must equal 0.3.
    let next = (next * REWARD_STEPS).round() / REWARD_STEPS;
    // `clamp` would panic on an unchecked spec with `low > high`.
    next.min(adaptive.high).max(adaptive.low)
}

#[expect(clippy::cast_precision_loss, reason = "far fewer samples than 2^52")]
fn ratio_of(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_of_a_schedule_stays() {
        let values = [3.0, 2.0, 1.0];
        let found: Vec<_> = (0..6).map(|cycle| scheduled_value(&values, cycle)).collect();
        let expected = [3.0, 3.0, 2.0, 1.0, 1.0, 1.0].map(Some);
        assert_eq!(found, expected, "cycle 0 samples as the first cycle would");
        assert_eq!(scheduled_value(&[], 1), None);
    }
}
