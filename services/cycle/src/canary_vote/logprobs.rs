//! Compares the log-probabilities of a text's tokens.

/// In nats. Engines cut off very small probabilities at different values, so lower ones count as
/// equal.
const LOGPROB_MIN: f64 = -30.0;

#[derive(Debug)]
pub(super) struct CanaryVote<'a> {
    pub(super) voter: String,
    /// Log-probabilities in nats.
    pub(super) canary: &'a [f32],
    /// The agent trained the policy.
    pub(super) is_trainer: bool,
}

fn clamp_logprob(value: f32) -> f64 {
    let value = f64::from(value);
    // NaN fails the comparison and stays NaN.
    if value < LOGPROB_MIN { LOGPROB_MIN } else { value }
}

#[expect(clippy::cast_precision_loss, reason = "a text has few tokens")]
fn divide_by_tokens(sum: f64, tokens: usize) -> f64 {
    sum / tokens.max(1) as f64
}

pub(super) fn mean_logprob(canary: &[f32]) -> f64 {
    divide_by_tokens(canary.iter().copied().map(clamp_logprob).sum(), canary.len())
}

/// Returns the mean absolute difference in nats per token; `None` if the lengths differ, the values
/// are empty, or the result is not finite. Finer than the difference of the means, in which
/// opposite differences of two tokens would cancel out.
pub(super) fn mean_distance(a: &[f32], b: &[f32]) -> Option<f64> {
    if a.len() != b.len() || a.is_empty() {
        return None;
    }
    let sizes = a.iter().zip(b).map(|(a, b)| (clamp_logprob(*a) - clamp_logprob(*b)).abs());
    let distance = divide_by_tokens(sizes.sum(), a.len());
    distance.is_finite().then_some(distance)
}

/// Returns the vote that most votes agree with if they are more than half, else the trainer's if at
/// least half agree with it. Ties are broken by the smallest total distance, then by name.
pub(super) fn select_reference<'a>(votes: &[CanaryVote<'a>], tolerance: f64) -> Option<&'a [f32]> {
    let support = |vote: &CanaryVote<'_>| {
        let near = votes.iter().filter_map(|other| mean_distance(vote.canary, other.canary));
        let near: Vec<f64> = near.filter(|distance| *distance <= tolerance).collect();
        (near.len(), near.iter().sum::<f64>())
    };
    let ranked = votes.iter().map(|vote| (support(vote), vote));
    let ((most, _), best) = ranked.min_by(|((n, far), a), ((m, near), b)| {
        m.cmp(n).then(far.total_cmp(near)).then(a.voter.cmp(&b.voter))
    })?;
    if 2 * most > votes.len() {
        return Some(best.canary);
    }
    let trained = votes.iter().find(|vote| vote.is_trainer)?;
    (2 * support(trained).0 >= votes.len()).then_some(trained.canary)
}
