//! Selects the report that counts as correct.

use wire::mean_logprob_distance;

#[derive(Debug)]
pub(super) struct CanaryVote<'a> {
    pub(super) voter: String,
    /// Log-probabilities in nats.
    pub(super) canary: &'a [f32],
    /// The agent trained the policy.
    pub(super) is_trainer: bool,
}

/// Returns the vote that most votes agree with if they are more than half, else the trainer's if at
/// least half agree with it. Ties are broken by the smallest total distance, then by name.
pub(super) fn select_reference<'a>(votes: &[CanaryVote<'a>], tolerance: f64) -> Option<&'a [f32]> {
    let support = |vote: &CanaryVote<'_>| {
        let near =
            votes.iter().filter_map(|other| mean_logprob_distance(vote.canary, other.canary));
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
