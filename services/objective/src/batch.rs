//! The log-probabilities of a sequence, and the totals of a batch.

use crate::pairs::SequenceSums;

/// The log-probabilities of a sequence's tokens, in nats. All lists have the same length.
#[derive(Debug, Clone, Copy)]
pub struct SequenceLogprobs<'a> {
    /// Of the model that is trained, in this pass.
    pub now: &'a [f64],
    /// Of the policy that drew the sequence, by the engine that trains.
    pub old: Option<&'a [f64]>,
    /// Of the policy that drew the sequence, by the engine that drew it.
    pub behaviour: Option<&'a [f64]>,
    /// Of the reference model or the teacher.
    pub reference: Option<&'a [f64]>,
}

/// The counts over which the loss of a batch is a mean.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BatchTotals {
    pub sequences: usize,
    pub tokens: usize,
    pub pairs: usize,
    /// The mean of [`SequenceLogprobs::gain`], in nats.
    pub mean_gain: f64,
}

impl SequenceLogprobs<'_> {
    /// Returns how much likelier the sequence is now than by the reference, in nats; 0 without a
    /// reference.
    pub fn gain(&self) -> f64 {
        let sums = self.sums();
        sums.now - sums.reference
    }

    pub(crate) fn sums(&self) -> SequenceSums {
        let now = self.now.iter().sum();
        let reference = self.reference.map_or(now, |list| list.iter().sum());
        SequenceSums { now, reference, tokens: self.now.len() }
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
pub(crate) fn to_f64(count: usize) -> f64 {
    count.max(1) as f64
}
