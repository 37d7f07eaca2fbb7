//! Draws one token from logits. Ties go to the lower token id.

use super::Sampling;
use crate::random::Random;

/// Uses exactly one random number, or none when greedy. Probabilities are f64.
pub(super) fn draw(logits: &[f32], sampling: &Sampling, random: &mut Random) -> u32 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if sampling.temperature == 0.0 {
        return logits.iter().position(|logit| *logit == most).unwrap_or(0) as u32;
    }
    let weight = |logit: f32| (f64::from(logit - most) / sampling.temperature).exp();
    if sampling.top_k == 0 && sampling.top_p == 1.0 {
        let weights: Vec<f64> = logits.iter().map(|logit| weight(*logit)).collect();
        return pick(&weights, random) as u32;
    }
    let mut kept: Vec<(f64, usize)> =
        logits.iter().enumerate().map(|(token, logit)| (weight(*logit), token)).collect();
    let by_weight = |a: &(f64, usize), b: &(f64, usize)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
    if (1..kept.len()).contains(&sampling.top_k) {
        kept.select_nth_unstable_by(sampling.top_k - 1, by_weight);
        kept.truncate(sampling.top_k);
    }
    kept.sort_unstable_by(by_weight);
    cut_to_nucleus(&mut kept, sampling.top_p);
    let weights: Vec<f64> = kept.iter().map(|(weight, _)| *weight).collect();
    kept[pick(&weights, random)].1 as u32
}

/// Keeps the fewest of the largest weights that together have a share of at least `top_p`.
fn cut_to_nucleus(kept: &mut Vec<(f64, usize)>, top_p: f64) {
    let total: f64 = kept.iter().map(|(weight, _)| weight).sum();
    let mut share = 0.0;
    let reached = kept.iter().position(|(weight, _)| {
        share += weight / total;
        share >= top_p
    });
    kept.truncate(reached.map_or(kept.len(), |last| last + 1));
}

fn pick(weights: &[f64], random: &mut Random) -> usize {
    let mut left = random.uniform() * weights.iter().sum::<f64>();
    let found = weights.iter().position(|weight| {
        left -= weight;
        left < 0.0
    });
    found.unwrap_or_else(|| weights.iter().rposition(|weight| *weight > 0.0).unwrap_or(0))
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
}
