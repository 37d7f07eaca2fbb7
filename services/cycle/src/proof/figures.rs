//! Log-probabilities of a text's tokens, compared.

/// Below this, probabilities are as good as none: engines cut them off at different places.
const LEAST: f64 = -30.0;

/// What one says who may know.
#[derive(Debug)]
pub(super) struct Vote<'a> {
    pub(super) who: String,
    pub(super) canary: &'a [f32],
    /// Its own work.
    pub(super) trained: bool,
}

fn nats(value: f32) -> f64 {
    let value = f64::from(value);
    // No number stays none.
    if value < LEAST { LEAST } else { value }
}

#[expect(clippy::cast_precision_loss, reason = "a text has few tokens")]
fn per_token(sum: f64, tokens: usize) -> f64 {
    sum / tokens.max(1) as f64
}

/// Nats a token.
pub(super) fn mean(canary: &[f32]) -> f64 {
    per_token(canary.iter().copied().map(nats).sum(), canary.len())
}

/// Mean size of the differences, nats a token. Finer than a difference of means, in which what one
/// token gained and another lost would not show. `None` for other tokens, or none.
pub(super) fn distance(a: &[f32], b: &[f32]) -> Option<f64> {
    if a.len() != b.len() || a.is_empty() {
        return None;
    }
    let sizes = a.iter().zip(b).map(|(a, b)| (nats(*a) - nats(*b)).abs());
    let distance = per_token(sizes.sum(), a.len());
    distance.is_finite().then_some(distance)
}

/// What is right, if that can be known: what more than half agree with, else what half agree with
/// and whoever trained it. Of those, what has the most on its side, and is nearest to them.
pub(super) fn reference<'a>(votes: &[Vote<'a>], tolerance: f64) -> Option<&'a [f32]> {
    let support = |vote: &Vote<'_>| {
        let near = votes.iter().filter_map(|other| distance(vote.canary, other.canary));
        let near: Vec<f64> = near.filter(|distance| *distance <= tolerance).collect();
        (near.len(), near.iter().sum::<f64>())
    };
    let ranked = votes.iter().map(|vote| (support(vote), vote));
    let ((most, _), best) = ranked.min_by(|((n, far), a), ((m, near), b)| {
        m.cmp(n).then(far.total_cmp(near)).then(a.who.cmp(&b.who))
    })?;
    if 2 * most > votes.len() {
        return Some(best.canary);
    }
    let trained = votes.iter().find(|vote| vote.trained)?;
    (2 * support(trained).0 >= votes.len()).then_some(trained.canary)
}
