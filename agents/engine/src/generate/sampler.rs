//! Draws one token from logits. On ties the lower token id wins.

use super::SamplingParameters;
use crate::ops::{math, run_vectorised};
use crate::random::RandomStream;
use std::cmp::Ordering;

/// Draws a token with exactly one random number, or none if greedy. Probabilities are f64 sums of
/// f32 exponentials.
pub(super) fn draw_token(
    logits: &[f32],
    sampling: &SamplingParameters,
    random: &mut RandomStream,
) -> u32 {
    let scale = (1.0 / sampling.temperature) as f32;
    if !scale.is_finite() {
        return pick_greedy(logits);
    }
    let weights = run_vectorised(
        #[inline(always)]
        || exponential_weights(logits, scale),
    );
    if sampling.top_k == 0 && sampling.top_p == 1.0 {
        return pick_weighted(&weights, random) as u32;
    }
    let mut kept: Vec<(f32, usize)> = weights.into_iter().zip(0..).collect();
    if (1..kept.len()).contains(&sampling.top_k) {
        kept.select_nth_unstable_by(sampling.top_k - 1, compare_weights);
        kept.truncate(sampling.top_k);
    }
    cut_to_nucleus(&mut kept, sampling.top_p);
    let weights: Vec<f32> = kept.iter().map(|(weight, _)| *weight).collect();
    kept[pick_weighted(&weights, random)].1 as u32
}

fn pick_greedy(logits: &[f32]) -> u32 {
    let most = run_vectorised(
        #[inline(always)]
        || math::max_value(logits),
    );
    logits.iter().position(|logit| *logit == most).unwrap_or(0) as u32
}

/// Returns `e^((logit - most) * scale)` for each logit, where `most` is the largest.
#[inline(always)]
fn exponential_weights(logits: &[f32], scale: f32) -> Vec<f32> {
    let most = math::max_value(logits);
    logits.iter().map(|logit| math::fast_exp((logit - most) * scale)).collect()
}

/// Orders by descending weight; equal weights by ascending token.
fn compare_weights(a: &(f32, usize), b: &(f32, usize)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// The number of largest weights that are sorted in the first attempt to find the nucleus.
const NUCLEUS_START: usize = 256;

/// Keeps the fewest of the largest weights whose share of the total is at least `top_p`, in
/// descending order.
fn cut_to_nucleus(kept: &mut Vec<(f32, usize)>, top_p: f64) {
    let total: f64 = kept.iter().map(|(weight, _)| f64::from(*weight)).sum();
    let mut sorted = NUCLEUS_START;
    loop {
        if sorted < kept.len() {
            kept.select_nth_unstable_by(sorted, compare_weights);
        }
        let last = sorted.min(kept.len());
        let largest = &mut kept[..last];
        largest.sort_unstable_by(compare_weights);
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

/// Sums over blocks of 128 make the search short.
fn pick_weighted(weights: &[f32], random: &mut RandomStream) -> usize {
    const BLOCK: usize = 128;
    let sum = |block: &[f32]| block.iter().map(|weight| f64::from(*weight)).sum::<f64>();
    let sums: Vec<f64> = weights.chunks(BLOCK).map(sum).collect();
    let mut left = random.next_uniform() * sums.iter().sum::<f64>();
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

    fn share_of_each(sampling: &SamplingParameters) -> Vec<f64> {
        let logits = [0.0, 2f32.ln(), 5f32.ln(), 2f32.ln()];
        let mut random = RandomStream::new(3);
        let mut counts = vec![0.0; logits.len()];
        for _ in 0..20_000 {
            counts[draw_token(&logits, sampling, &mut random) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    #[test]
    fn tokens_are_drawn_as_often_as_they_are_likely() {
        let all = SamplingParameters { temperature: 1.0, top_k: 0, top_p: 1.0, max_new_tokens: 1 };
        let cases = [
            (all, [0.1, 0.2, 0.5, 0.2]),
            (SamplingParameters { top_k: 2, ..all }, [0.0, 2.0 / 7.0, 5.0 / 7.0, 0.0]),
            (SamplingParameters { top_p: 0.6, ..all }, [0.0, 2.0 / 7.0, 5.0 / 7.0, 0.0]),
            (SamplingParameters { temperature: 0.0, ..all }, [0.0, 0.0, 1.0, 0.0]),
            (
                SamplingParameters { temperature: 0.5, ..all },
                [1.0 / 34.0, 4.0 / 34.0, 25.0 / 34.0, 4.0 / 34.0],
            ),
        ];
        for (sampling, expected) in cases {
            for (share, expected) in share_of_each(&sampling).into_iter().zip(expected) {
                assert!((share - expected).abs() < 0.015, "{sampling:?}: {share} {expected}");
            }
        }
    }

    /// Computes the same as `draw_token`, without its shortcuts.
    fn naive(logits: &[f32], sampling: &SamplingParameters, random: &mut RandomStream) -> usize {
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
        let mut left = random.next_uniform() * kept.iter().map(|(weight, _)| weight).sum::<f64>();
        let found = kept.iter().position(|(weight, _)| {
            left -= weight;
            left < 0.0
        });
        kept[found.unwrap_or(0)].1
    }

    #[test]
    fn a_large_vocabulary_is_drawn_from_as_a_naive_sampler_does() {
        let mut noise = RandomStream::new(9);
        let logits: Vec<f32> = (0..20_000).map(|_| 2.0 * noise.next_normal() as f32).collect();
        let all = SamplingParameters { temperature: 0.8, top_k: 0, top_p: 1.0, max_new_tokens: 1 };
        for sampling in [
            all,
            SamplingParameters { top_k: 40, ..all },
            SamplingParameters { top_p: 0.3, ..all },
            SamplingParameters { top_p: 0.99, ..all },
            SamplingParameters { top_p: 0.9, top_k: 3000, temperature: 1.5, ..all },
        ] {
            let (mut ours, mut theirs) = (RandomStream::new(4), RandomStream::new(4));
            for _ in 0..50 {
                let drawn = draw_token(&logits, &sampling, &mut ours) as usize;
                assert_eq!(drawn, naive(&logits, &sampling, &mut theirs), "{sampling:?}");
            }
        }
    }
}
