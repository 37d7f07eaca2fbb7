//! Draws one token from logits. Ties go to the lower token id.

use super::Sampling;
use crate::ops::{math, wide};
use crate::random::Random;
use std::cmp::Ordering;

/// Uses exactly one random number, or none when greedy. Probabilities are f64 of f32 exponentials.
pub(super) fn draw(logits: &[f32], sampling: &Sampling, random: &mut Random) -> u32 {
    let scale = (1.0 / sampling.temperature) as f32;
    if !scale.is_finite() {
        return greedy(logits);
    }
    let weights = wide(
        #[inline(always)]
        || weights(logits, scale),
    );
    if sampling.top_k == 0 && sampling.top_p == 1.0 {
        return pick(&weights, random) as u32;
    }
    let mut kept: Vec<(f32, usize)> = weights.into_iter().zip(0..).collect();
    if (1..kept.len()).contains(&sampling.top_k) {
        kept.select_nth_unstable_by(sampling.top_k - 1, by_weight);
        kept.truncate(sampling.top_k);
    }
    cut_to_nucleus(&mut kept, sampling.top_p);
    let weights: Vec<f32> = kept.iter().map(|(weight, _)| *weight).collect();
    kept[pick(&weights, random)].1 as u32
}

fn greedy(logits: &[f32]) -> u32 {
    let most = wide(
        #[inline(always)]
        || math::max(logits),
    );
    logits.iter().position(|logit| *logit == most).unwrap_or(0) as u32
}

/// `e^((logit - most) * scale)`
#[inline(always)]
fn weights(logits: &[f32], scale: f32) -> Vec<f32> {
    let most = math::max(logits);
    logits.iter().map(|logit| math::exp((logit - most) * scale)).collect()
}

/// Larger first; of equal ones the lower token.
fn by_weight(a: &(f32, usize), b: &(f32, usize)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Sorted, as many of the largest as the first try has.
const NUCLEUS: usize = 256;

/// Keeps the fewest of the largest weights that together have a share of at least `top_p`, the
/// largest first.
fn cut_to_nucleus(kept: &mut Vec<(f32, usize)>, top_p: f64) {
    let total: f64 = kept.iter().map(|(weight, _)| f64::from(*weight)).sum();
    let mut sorted = NUCLEUS;
    loop {
        if sorted < kept.len() {
            kept.select_nth_unstable_by(sorted, by_weight);
        }
        let last = sorted.min(kept.len());
        let largest = &mut kept[..last];
        largest.sort_unstable_by(by_weight);
        let mut share = 0.0;
        let reached = largest.iter().position(|(weight, _)| {
            share += f64::from(*weight) / total;
            share >= top_p
        });
        match reached {
            Some(last) => return kept.truncate(last + 1),
            None if last == kept.len() => return,
            None => sorted *= 8,
        }
    }
}

/// By blocks, whose sums are passed over first.
fn pick(weights: &[f32], random: &mut Random) -> usize {
    const BLOCK: usize = 128;
    let sum = |block: &[f32]| block.iter().map(|weight| f64::from(*weight)).sum::<f64>();
    let sums: Vec<f64> = weights.chunks(BLOCK).map(sum).collect();
    let mut left = random.uniform() * sums.iter().sum::<f64>();
    let mut start = 0;
    for sum in sums {
        if left < sum {
            break;
        }
        (left, start) = (left - sum, start + BLOCK);
    }
    let found = weights.get(start..).unwrap_or_default().iter().position(|weight| {
        left -= f64::from(*weight);
        left < 0.0
    });
    let last = || weights.iter().rposition(|weight| *weight > 0.0).unwrap_or(0);
    found.map_or_else(last, |place| start + place)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share_of_each(sampling: &Sampling) -> Vec<f64> {
        let logits = [0.0, 2f32.ln(), 5f32.ln(), 2f32.ln()];
        let mut random = Random::new(3);
        let mut counts = vec![0.0; logits.len()];
        for _ in 0..20_000 {
            counts[draw(&logits, sampling, &mut random) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    #[test]
    fn tokens_are_drawn_as_often_as_they_are_likely() {
        let all = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, max_new_tokens: 1 };
        let cases = [
            (all, [0.1, 0.2, 0.5, 0.2]),
            (Sampling { top_k: 2, ..all }, [0.0, 2.0 / 7.0, 5.0 / 7.0, 0.0]),
            (Sampling { top_p: 0.6, ..all }, [0.0, 2.0 / 7.0, 5.0 / 7.0, 0.0]),
            (Sampling { temperature: 0.0, ..all }, [0.0, 0.0, 1.0, 0.0]),
            (
                Sampling { temperature: 0.5, ..all },
                [1.0 / 34.0, 4.0 / 34.0, 25.0 / 34.0, 4.0 / 34.0],
            ),
        ];
        for (sampling, expected) in cases {
            for (share, expected) in share_of_each(&sampling).into_iter().zip(expected) {
                assert!((share - expected).abs() < 0.015, "{sampling:?}: {share} {expected}");
            }
        }
    }

    /// What [`draw`] did before it was fast.
    fn naive(logits: &[f32], sampling: &Sampling, random: &mut Random) -> usize {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| (f64::from(logit - most) / sampling.temperature).exp();
        let mut kept: Vec<(f64, usize)> =
            logits.iter().map(|logit| weight(*logit)).zip(0..).collect();
        kept.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        if sampling.top_k > 0 {
            kept.truncate(sampling.top_k);
        }
        let total: f64 = kept.iter().map(|(weight, _)| weight).sum();
        let mut share = 0.0;
        let reached = kept.iter().position(|(weight, _)| {
            share += weight / total;
            share >= sampling.top_p
        });
        kept.truncate(reached.map_or(kept.len(), |last| last + 1));
        if sampling.top_k == 0 && sampling.top_p == 1.0 {
            kept.sort_by_key(|(_, token)| *token);
        }
        let mut left = random.uniform() * kept.iter().map(|(weight, _)| weight).sum::<f64>();
        let found = kept.iter().position(|(weight, _)| {
            left -= weight;
            left < 0.0
        });
        kept[found.unwrap_or(0)].1
    }

    #[test]
    fn a_large_vocabulary_is_drawn_from_as_a_naive_sampler_does() {
        let mut noise = Random::new(9);
        let logits: Vec<f32> = (0..20_000).map(|_| 2.0 * noise.normal() as f32).collect();
        let all = Sampling { temperature: 0.8, top_k: 0, top_p: 1.0, max_new_tokens: 1 };
        for sampling in [
            all,
            Sampling { top_k: 40, ..all },
            Sampling { top_p: 0.3, ..all },
            Sampling { top_p: 0.99, ..all },
            Sampling { top_p: 0.9, top_k: 3000, temperature: 1.5, ..all },
        ] {
            let (mut ours, mut theirs) = (Random::new(4), Random::new(4));
            for _ in 0..50 {
                let drawn = draw(&logits, &sampling, &mut ours) as usize;
                assert_eq!(drawn, naive(&logits, &sampling, &mut theirs), "{sampling:?}");
            }
        }
    }
}
