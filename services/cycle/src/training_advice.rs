//! Advice from the figures of a training.

use wire::v1;

/// Share of dropped tokens from which a training has moved too far from its samples.
const DROPPED_SHARE_MAX: f64 = 0.2;

/// Divergence from the weights that drew the samples, in nats per token, from which the samples say
/// little about the trained weights.
const DRIFT_MAX: f64 = 0.1;

/// Divergence from the reference, in nats per token, from which little of the reference is left.
const DIVERGENCE_MAX: f64 = 0.5;

/// Returns what to change after a training, by the weights that its objective gave to tokens; empty
/// if nothing is wrong or no objective weighted them.
pub fn advise_on_training(checkpoint: &v1::Checkpoint) -> Vec<String> {
    let Some(found) = &checkpoint.weighting else { return Vec::new() };
    let mut advice = Vec::new();
    let (dropped, drift) = (found.dropped_share(), found.drift.unwrap_or_default());
    if dropped > DROPPED_SHARE_MAX || drift > DRIFT_MAX {
        advice.push(format!(
            "training moved far from the weights that drew its samples: it drifted by {drift:.3} \
             nats per token, and {:.0} % of the tokens were dropped: lower training.learning_rate \
             or epochs, or raise batch_size",
            dropped * 100.0
        ));
    }
    if found.clipped > 0 {
        advice.push(format!(
            "{} tokens had weights beyond the largest one: lower training.learning_rate",
            found.clipped
        ));
    }
    if let Some(divergence) = found.divergence.filter(|nats| *nats > DIVERGENCE_MAX) {
        advice.push(format!(
            "the weights are {divergence:.3} nats per token away from the reference: raise the \
             objective's kl, or lower training.learning_rate"
        ));
    }
    advice
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_follows_from_drift_clipping_and_divergence() {
        let advise = |weighting| {
            let checkpoint = v1::Checkpoint { weighting, ..Default::default() };
            advise_on_training(&checkpoint)
        };
        assert_eq!(advise(None), Vec::<String>::new());
        let calm = v1::checkpoint::Weighting {
            tokens: 100,
            dropped: 20,
            drift: Some(0.1),
            divergence: Some(0.5),
            ..Default::default()
        };
        assert_eq!(advise(Some(calm.clone())), Vec::<String>::new());
        let dropped = v1::checkpoint::Weighting { dropped: 21, ..calm.clone() };
        assert!(advise(Some(dropped))[0].contains("0.100 nats per token, and 21 %"));
        let drifted = v1::checkpoint::Weighting { drift: Some(0.11), ..calm.clone() };
        assert!(advise(Some(drifted))[0].contains("lower training.learning_rate or epochs"));
        let clipped = v1::checkpoint::Weighting { clipped: 1, ..calm.clone() };
        assert!(advise(Some(clipped))[0].contains("1 tokens had weights"));
        let far = v1::checkpoint::Weighting { divergence: Some(0.51), ..calm };
        assert!(advise(Some(far))[0].contains("raise the objective's kl"));
    }
}
