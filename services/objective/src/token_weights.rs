//! The weights of the tokens of one sequence or pair in a batch. A training computes them in every
//! step.

use crate::{
    BatchTotals, DesirableLoss, Objective, ObjectiveLoss, SequenceLogprobs, SettingKey,
    batch::to_f64, pairs::sigmoid,
};

/// Larger weights, before they are divided by a number of tokens or sequences, are clipped to this.
pub const WEIGHT_MAX: f64 = 1e4;

/// The weights of a sequence's tokens: `-∂loss/∂logprob`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WeightedTokens {
    pub weights: Vec<f64>,
    /// The number of weights that are 0 without a divergence, because a ratio is out of bounds.
    pub dropped: usize,
    /// The number of weights that were beyond [`WEIGHT_MAX`].
    pub clipped: usize,
}

impl Objective {
    /// Computes the weights of a sequence with this advantage. For a loss of pairs, use
    /// [`Self::weigh_pair`].
    pub fn weigh_sequence(
        &self,
        advantage: f64,
        logprobs: SequenceLogprobs<'_>,
        totals: &BatchTotals,
    ) -> WeightedTokens {
        let tokens = logprobs.now.len();
        let (raw, divisor) = match self.loss() {
            ObjectiveLoss::Policy(loss) => {
                // With a correction, the ratio is between two passes of the engine that trains, and
                // the correction stands for the rest.
                let drawn = logprobs.behaviour.filter(|_| !self.has_correction());
                let old = logprobs.old.or(drawn);
                let logprobs = SequenceLogprobs { old, ..logprobs };
                let raw = loss.ratio.weigh_tokens(advantage, logprobs);
                (raw, loss.mean.divisor(tokens, totals))
            }
            ObjectiveLoss::Desirable(loss) => {
                let weight = loss.weigh_sequence(advantage, logprobs.gain(), totals.mean_gain);
                (vec![weight; tokens], to_f64(totals.sequences))
            }
            ObjectiveLoss::Pairs(_) => (vec![0.0; tokens], 1.0),
        };
        let mut found = self.finish_weights(raw, divisor, logprobs);
        if advantage == 0.0 {
            found.dropped = 0;
        }
        found
    }

    /// Computes the weights of the chosen and of the rejected sequence of a pair. They are 0 if the
    /// loss is not one of pairs.
    pub fn weigh_pair(
        &self,
        pair: [SequenceLogprobs<'_>; 2],
        totals: &BatchTotals,
    ) -> [WeightedTokens; 2] {
        let weights = match self.loss() {
            ObjectiveLoss::Pairs(loss) => loss.weigh_pair(pair[0].sums(), pair[1].sums()),
            ObjectiveLoss::Policy(_) | ObjectiveLoss::Desirable(_) => [0.0; 2],
        };
        let divisor = to_f64(totals.pairs);
        std::array::from_fn(|side| {
            let raw = vec![weights[side]; pair[side].now.len()];
            self.finish_weights(raw, divisor, pair[side])
        })
    }

    /// Applies the common settings, clips and divides.
    fn finish_weights(
        &self,
        mut weights: Vec<f64>,
        divisor: f64,
        logprobs: SequenceLogprobs<'_>,
    ) -> WeightedTokens {
        self.correct_weights(logprobs, &mut weights);
        let dropped = weights.iter().filter(|weight| **weight == 0.0).count();
        self.add_kl(logprobs, &mut weights);
        let clipped = weights.iter().filter(|weight| weight.abs() > WEIGHT_MAX).count();
        for weight in &mut weights {
            *weight = weight.clamp(-WEIGHT_MAX, WEIGHT_MAX) / divisor;
        }
        WeightedTokens { weights, dropped, clipped }
    }

    /// Multiplies by `exp(old - behaviour)`, truncated or masked.
    fn correct_weights(&self, logprobs: SequenceLogprobs<'_>, weights: &mut [f64]) {
        let Some(behaviour) = logprobs.behaviour.filter(|_| self.has_correction()) else { return };
        let old = logprobs.old.unwrap_or(logprobs.now);
        let differences = || old.iter().zip(behaviour).map(|(old, drawn)| old - drawn);
        let of_sequence = differences().sum::<f64>().exp();
        let max = |key| Some(self.value(key)).filter(|max| *max > 0.0);
        let correct = |of_token: f64| {
            if let Some(max) = max(SettingKey::TruncateTokens) {
                of_token.min(max)
            } else if let Some(max) = max(SettingKey::TruncateSequences) {
                of_sequence.min(max)
            } else if let Some(max) = max(SettingKey::MaskTokens) {
                if of_token > max { 0.0 } else { of_token }
            } else {
                let max = self.value(SettingKey::MaskSequences);
                if of_sequence > max { 0.0 } else { of_sequence }
            }
        };
        for (weight, difference) in weights.iter_mut().zip(differences()) {
            *weight *= correct(difference.exp());
        }
    }

    /// Adds the KL divergence from the reference, estimated by `exp(d) - d - 1` with
    /// `d = reference - now`, which is never negative (J. Schulman's k3).
    fn add_kl(&self, logprobs: SequenceLogprobs<'_>, weights: &mut [f64]) {
        let kl = self.value(SettingKey::Kl);
        let Some(reference) = logprobs.reference.filter(|_| kl > 0.0) else { return };
        for (weight, (now, reference)) in weights.iter_mut().zip(logprobs.now.iter().zip(reference))
        {
            *weight += kl * (reference - now).exp_m1();
        }
    }
}

impl DesirableLoss {
    /// Returns the weight of each token. `advantage` is above 0 for a sequence that passes.
    fn weigh_sequence(&self, advantage: f64, gain: f64, mean_gain: f64) -> f64 {
        let (sign, importance) =
            if advantage > 0.0 { (1.0, self.desirable) } else { (-1.0, self.undesirable) };
        let share = sigmoid(sign * self.beta * (gain - mean_gain.max(0.0)));
        sign * importance * self.beta * share * (1.0 - share)
    }
}
