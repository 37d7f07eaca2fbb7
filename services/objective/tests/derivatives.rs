//! Compares the weights of every objective with finite differences of its loss, which is written
//! here from the papers, sequence by sequence.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use objective::{Objective, ObjectiveName, ScoredSequence, compute_weights};

const STEP: f64 = 1e-6;
const TOLERANCE: f64 = 1e-7;

/// Twelve sequences of three prompts. Ratios lie on both sides of all bounds.
fn sequences() -> Vec<ScoredSequence> {
    let mut state = 7_u64;
    let mut next = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from(u32::try_from(state >> 33).unwrap()) / f64::from(1_u32 << 31)
    };
    let mut sequence = |number: usize| {
        let tokens = 2 + number % 4;
        let behaviour: Vec<f64> = (0..tokens).map(|_| -0.1 - 2.0 * next()).collect();
        let spread = [0.01, 0.5, 4.0][number % 3];
        let logprobs: Vec<f64> =
            behaviour.iter().map(|it| (it + spread * (next() - 0.5)).min(-0.01)).collect();
        let reference = behaviour.iter().map(|it| it - 0.3 * next()).collect();
        ScoredSequence {
            prompt_id: format!("p{}", number / 4),
            reward: [0.0, 1.0, 0.5, 1.0][number % 4] * f64::from(u8::from(number < 10)),
            logprobs,
            behaviour: Some(behaviour),
            old: None,
            reference: Some(reference),
        }
    };
    (0..12).map(&mut sequence).collect()
}

fn sum(values: &[f64]) -> f64 {
    values.iter().sum()
}

fn sigmoid(value: f64) -> f64 {
    1.0 / (1.0 + (-value).exp())
}

fn group<'a>(all: &'a [ScoredSequence], one: &ScoredSequence) -> Vec<&'a ScoredSequence> {
    all.iter().filter(|it| it.prompt_id == one.prompt_id).collect()
}

/// Returns reward minus mean, and the unbiased deviation, of a sequence in its group.
fn centered(all: &[ScoredSequence], one: &ScoredSequence) -> (f64, f64) {
    let rewards: Vec<f64> = group(all, one).iter().map(|it| it.reward).collect();
    let count = rewards.len() as f64;
    let mean = sum(&rewards) / count;
    let squares: f64 = rewards.iter().map(|it| (it - mean) * (it - mean)).sum();
    (one.reward - mean, (squares / (count - 1.0)).sqrt())
}

fn standardized(all: &[ScoredSequence], one: &ScoredSequence) -> f64 {
    let (gain, deviation) = centered(all, one);
    gain / (deviation + 1e-4)
}

fn is_best(all: &[ScoredSequence], one: &ScoredSequence) -> bool {
    one.reward > 0.0 && group(all, one).iter().all(|it| it.reward <= one.reward)
}

/// Returns the clipped surrogate of each token, negated.
fn surrogate(now: &[f64], one: &ScoredSequence, gain: f64, low: f64, high: f64) -> Vec<f64> {
    let drawn = one.behaviour.as_ref().unwrap();
    let each = now.iter().zip(drawn).map(|(now, drawn)| {
        let ratio = (now - drawn).exp();
        -(ratio * gain).min(ratio.clamp(1.0 - low, 1.0 + high) * gain)
    });
    each.collect()
}

/// Returns the part of one sequence in the loss of an objective, before it is divided; `None` if the
/// objective has no such part.
fn sequence_loss(
    name: ObjectiveName,
    all: &[ScoredSequence],
    one: &ScoredSequence,
    now: &[f64],
) -> Option<f64> {
    let length = now.len() as f64;
    let best = if is_best(all, one) { 1.0 } else { 0.0 };
    let clipped = |gain: f64| sum(&surrogate(now, one, gain, 0.2, 0.2));
    Some(match name {
        ObjectiveName::Raft => -best * sum(now),
        ObjectiveName::Ssd => -sum(now),
        ObjectiveName::Dft => {
            now.iter().zip(&one.logprobs).map(|(now, start)| -start.exp() * now).sum()
        }
        ObjectiveName::RaftPlusPlus => clipped(best) / length,
        ObjectiveName::ReinforceRej => {
            let is_mixed = group(all, one).iter().any(|it| it.reward != one.reward);
            clipped(if is_mixed { 2.0 * one.reward - 1.0 } else { 0.0 }) / length
        }
        ObjectiveName::Rloo => {
            let rewards: Vec<f64> = group(all, one).iter().map(|it| it.reward).collect();
            let others = (sum(&rewards) - one.reward) / (rewards.len() as f64 - 1.0);
            -(one.reward - others) * sum(now)
        }
        ObjectiveName::Grpo => clipped(standardized(all, one)) / length,
        ObjectiveName::DrGrpo => clipped(centered(all, one).0) / 9.0,
        ObjectiveName::Dapo => sum(&surrogate(now, one, standardized(all, one), 0.2, 0.28)),
        ObjectiveName::Gspo => {
            let drawn = one.behaviour.as_ref().unwrap();
            let ratio = ((sum(now) - sum(drawn)) / length).exp();
            let gain = standardized(all, one);
            -(ratio * gain).min(ratio.clamp(1.0 - 3e-4, 1.0 + 4e-4) * gain)
        }
        ObjectiveName::Cispo => {
            let drawn = one.behaviour.as_ref().unwrap();
            let fixed = one.logprobs.iter().zip(drawn).map(|(it, drawn)| (it - drawn).exp());
            let gain = standardized(all, one);
            fixed.zip(now).map(|(ratio, now)| -ratio.min(5.0) * gain * now).sum()
        }
        ObjectiveName::Distillation => {
            let teacher = one.reference.as_ref().unwrap();
            let each = one.logprobs.iter().zip(teacher).zip(now);
            each.map(|((fixed, teacher), now)| -(teacher - fixed) * now).sum()
        }
        ObjectiveName::Dpo | ObjectiveName::Simpo | ObjectiveName::Orpo | ObjectiveName::Kto => {
            return None;
        }
    })
}

/// Returns the loss of each best and worst sequence of a prompt, by their positions.
fn pair_losses(all: &[ScoredSequence], of: &dyn Fn(usize, usize) -> f64) -> Vec<f64> {
    let mut losses = Vec::new();
    for (better, one) in all.iter().enumerate() {
        let rewards: Vec<f64> = group(all, one).iter().map(|it| it.reward).collect();
        let best = rewards.iter().copied().fold(f64::MIN, f64::max);
        let worst = rewards.iter().copied().fold(f64::MAX, f64::min);
        for (worse, other) in all.iter().enumerate() {
            let is_pair = one.prompt_id == other.prompt_id && best > worst;
            if is_pair && one.reward == best && other.reward == worst {
                losses.push(of(better, worse));
            }
        }
    }
    losses
}

/// Returns the loss of an objective with the log-probabilities `now`; `start` has those that count
/// as constants.
fn loss(name: ObjectiveName, start: &[ScoredSequence], now: &[Vec<f64>]) -> f64 {
    let tokens: usize = now.iter().map(Vec::len).sum();
    let parts: Option<Vec<f64>> =
        start.iter().zip(now).map(|(one, now)| sequence_loss(name, start, one, now)).collect();
    if let Some(parts) = parts {
        let by_tokens = matches!(
            name,
            ObjectiveName::Dapo | ObjectiveName::Cispo | ObjectiveName::Distillation
        );
        return sum(&parts) / if by_tokens { tokens as f64 } else { start.len() as f64 };
    }
    let mean = |index: usize| sum(&now[index]) / now[index].len() as f64;
    let gain = |index: usize| sum(&now[index]) - sum(start[index].reference.as_ref().unwrap());
    let odds = |index: usize| mean(index) - (1.0 - mean(index).exp()).ln();
    let losses = match name {
        ObjectiveName::Dpo => {
            pair_losses(start, &|better, worse| -sigmoid(0.1 * (gain(better) - gain(worse))).ln())
        }
        ObjectiveName::Simpo => pair_losses(start, &|better, worse| {
            -sigmoid(2.5 * (mean(better) - mean(worse)) - 1.375).ln()
        }),
        ObjectiveName::Orpo => pair_losses(start, &|better, worse| {
            -mean(better) - 0.1 * sigmoid(odds(better) - odds(worse)).ln()
        }),
        _ => kto_losses(start, &gain),
    };
    sum(&losses) / losses.len() as f64
}

/// Returns the loss of each sequence by KTO. The gains at the start give its reference point.
fn kto_losses(start: &[ScoredSequence], gain: &dyn Fn(usize) -> f64) -> Vec<f64> {
    let start_gain =
        |one: &ScoredSequence| sum(&one.logprobs) - sum(one.reference.as_ref().unwrap());
    let gains: Vec<f64> = start.iter().map(start_gain).collect();
    let base = (sum(&gains) / gains.len() as f64).max(0.0);
    let each = start.iter().enumerate().map(|(index, one)| {
        let sign = if one.reward >= 0.5 { 1.0 } else { -1.0 };
        1.0 - sigmoid(sign * 0.1 * (gain(index) - base))
    });
    each.collect()
}

fn objective(name: ObjectiveName) -> Objective {
    let mut objective = Objective::new(name);
    if name == ObjectiveName::DrGrpo {
        objective.set("max_tokens", 9.0).unwrap();
    }
    objective
}

#[test]
fn weights_are_the_negative_derivatives_of_the_loss() {
    let start = sequences();
    let logprobs: Vec<Vec<f64>> = start.iter().map(|it| it.logprobs.clone()).collect();
    for name in ObjectiveName::ALL {
        let found = compute_weights(&objective(name), &start).unwrap();
        assert_eq!((found.voided, found.clipped), (0, 0));
        let mut largest: f64 = 0.0;
        for (sequence, weights) in found.weights.iter().enumerate() {
            for (token, weight) in weights.iter().enumerate() {
                let moved = |by: f64| {
                    let mut now = logprobs.clone();
                    now[sequence][token] += by;
                    loss(name, &start, &now)
                };
                let expected = -(moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                assert!(
                    (weight - expected).abs() < TOLERANCE,
                    "{name:?}: {weight} of token {token} of {sequence}, expected {expected}"
                );
                largest = largest.max(weight.abs());
            }
        }
        assert!(largest > 1e-4, "{name:?} has weights");
    }
}

#[test]
fn the_divergence_from_the_reference_is_added_to_any_objective() {
    let start = sequences();
    let plain = compute_weights(&objective(ObjectiveName::Rloo), &start).unwrap();
    let mut with_kl = objective(ObjectiveName::Rloo);
    with_kl.set("kl", 0.3).unwrap();
    let found = compute_weights(&with_kl, &start).unwrap();
    for (sequence, one) in start.iter().enumerate() {
        for (token, reference) in one.reference.as_ref().unwrap().iter().enumerate() {
            let k3 = |now: f64| (reference - now).exp() - (reference - now) - 1.0;
            let now = one.logprobs[token];
            let slope = (k3(now + STEP) - k3(now - STEP)) / (2.0 * STEP);
            let expected = plain.weights[sequence][token] - 0.3 * slope / start.len() as f64;
            assert!((found.weights[sequence][token] - expected).abs() < TOLERANCE);
        }
    }
}

#[test]
fn corrections_multiply_by_a_bounded_ratio_of_the_engines() {
    let mut start = sequences();
    for one in &mut start {
        one.old = Some(one.logprobs.iter().map(|now| now - 0.05).collect());
    }
    let uncorrected = compute_weights(&objective(ObjectiveName::Ssd), &start).unwrap();
    for (key, masks, whole) in [
        ("truncate_tokens", false, false),
        ("truncate_sequences", false, true),
        ("mask_tokens", true, false),
        ("mask_sequences", true, true),
    ] {
        let mut corrected = objective(ObjectiveName::Ssd);
        corrected.set(key, 1.5).unwrap();
        let found = compute_weights(&corrected, &start).unwrap();
        let mut bounded = 0;
        for (sequence, one) in start.iter().enumerate() {
            let drawn = one.behaviour.as_ref().unwrap();
            let apart: Vec<f64> = one
                .old
                .as_ref()
                .unwrap()
                .iter()
                .zip(drawn)
                .map(|(old, drawn)| old - drawn)
                .collect();
            for (token, difference) in apart.iter().enumerate() {
                let ratio = if whole { sum(&apart).exp() } else { difference.exp() };
                bounded += usize::from(ratio > 1.5);
                let factor = match ratio > 1.5 {
                    true if masks => 0.0,
                    true => 1.5,
                    false => ratio,
                };
                let expected = uncorrected.weights[sequence][token] * factor;
                assert!((found.weights[sequence][token] - expected).abs() < TOLERANCE, "{key}");
            }
        }
        assert!(bounded > 0, "{key} bounds something");
    }
}

#[test]
fn sequences_that_are_not_finite_do_not_count() {
    let start = sequences();
    let mut broken = start.clone();
    let mut extra = start[5].clone();
    extra.behaviour.as_mut().unwrap()[0] = f64::NAN;
    broken.insert(3, extra);
    for name in ObjectiveName::ALL {
        let mut found = compute_weights(&objective(name), &broken).unwrap();
        assert_eq!(found.voided, 1);
        assert!(found.weights.remove(3).iter().all(|weight| *weight == 0.0));
        assert_eq!(found.weights, compute_weights(&objective(name), &start).unwrap().weights);
    }
}

#[test]
fn large_weights_are_clipped_and_counted() {
    let mut start = sequences();
    start.truncate(4);
    start[0].behaviour = Some(vec![-40.0; start[0].logprobs.len()]);
    let mut grpo = objective(ObjectiveName::Grpo);
    grpo.set("clip", 1.0).unwrap();
    let found = compute_weights(&grpo, &start).unwrap();
    assert_eq!(found.clipped, start[0].logprobs.len());
    let limit = -objective::WEIGHT_MAX / (4.0 * start[0].logprobs.len() as f64);
    assert!(found.weights[0].iter().all(|weight| *weight == limit));
}

#[test]
fn what_an_objective_lacks_is_named() {
    let start = sequences();
    let refused = |name, change: &dyn Fn(&mut Vec<ScoredSequence>)| {
        let mut changed = start.clone();
        change(&mut changed);
        compute_weights(&objective(name), &changed).unwrap_err().to_string()
    };
    for (said, expected) in [
        (
            refused(ObjectiveName::Grpo, &|all| all[2].behaviour = None),
            "sequence 3 has no behaviour",
        ),
        (
            refused(ObjectiveName::Dpo, &|all| all[1].reference = None),
            "sequence 2 has no reference",
        ),
        (
            refused(ObjectiveName::Ssd, &|all| all[0].reference = Some(vec![-1.0])),
            "sequence 1 has 1 values in reference for 2 tokens",
        ),
        (refused(ObjectiveName::Rloo, &|all| all.truncate(1)), "draw at least 2"),
    ] {
        assert!(said.contains(expected), "{said}");
    }
    let bare = compute_weights(&Objective::new(ObjectiveName::DrGrpo), &start).unwrap_err();
    assert!(bare.to_string().contains("needs max_tokens"), "{bare}");
}
