//! Compares the log-probabilities of a canary text's tokens.

/// The reported log-probabilities of a canary text's tokens.
pub const CANARY_TOKENS_MAX: usize = 32;
/// The mean distance up to which two reports are of the same policy, in nats per token, unless a
/// spec sets another.
pub const CANARY_TOLERANCE: f64 = 0.02;

/// In nats. Engines cut off very small probabilities at different values, so lower ones count as
/// equal.
const LOGPROB_MIN: f64 = -30.0;

fn clamp_logprob(value: f32) -> f64 {
    let value = f64::from(value);
    // NaN fails the comparison and stays NaN.
    if value < LOGPROB_MIN { LOGPROB_MIN } else { value }
}

#[expect(clippy::cast_precision_loss, reason = "a text has few tokens")]
fn divide_by_tokens(sum: f64, tokens: usize) -> f64 {
    sum / tokens.max(1) as f64
}

/// Returns the mean of log-probabilities, in nats per token.
pub fn mean_logprob(canary: &[f32]) -> f64 {
    divide_by_tokens(canary.iter().copied().map(clamp_logprob).sum(), canary.len())
}

/// Returns the mean absolute difference in nats per token; `None` if the lengths differ, the values
/// are empty, or the result is not finite. Finer than the difference of the means, in which
/// opposite differences of two tokens would cancel out.
pub fn mean_logprob_distance(a: &[f32], b: &[f32]) -> Option<f64> {
    if a.len() != b.len() || a.is_empty() {
        return None;
    }
    let sizes = a.iter().zip(b).map(|(a, b)| (clamp_logprob(*a) - clamp_logprob(*b)).abs());
    let distance = divide_by_tokens(sizes.sum(), a.len());
    distance.is_finite().then_some(distance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_of_tokens_do_not_make_up_for_each_other() {
        let close = |a: &[f32], b: &[f32]| mean_logprob_distance(a, b);
        assert_eq!(mean_logprob(&[-1.0, -3.0]).to_bits(), mean_logprob(&[-2.0, -2.0]).to_bits());
        assert_eq!(close(&[-1.0, -3.0], &[-2.0, -2.0]), Some(1.0));
        assert_eq!(close(&[-40.0], &[f32::NEG_INFINITY]), Some(0.0), "as good as impossible");
        assert_eq!(close(&[-1.0], &[-1.0, -2.0]), None);
        assert_eq!(close(&[], &[]), None);
        assert_eq!(close(&[f32::NAN], &[f32::NAN]), None);
        assert_eq!(close(&[f32::NAN], &[-1.0]), None);
    }
}
