//! Weighs the tokens of a batch by an objective.

use super::TrainError;
use objective::{
    BatchTotals, Objective, ObjectiveLoss, Requirement, SequenceLogprobs, WeightedTokens,
};

/// The knowledge of an example that an objective uses. Lists have a value for each token of the
/// completion, in nats.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TrainingSignal {
    /// See `objective::Advantage`; unused in a loss of pairs.
    pub advantage: f64,
    /// Of the policy that drew the completion, by the engine that drew it.
    pub behaviour: Option<Vec<f64>>,
    /// Of the policy that drew the completion, by this engine.
    pub old: Option<Vec<f64>>,
    /// Of the reference model or the teacher.
    pub reference: Option<Vec<f64>>,
}

/// The upper bounds of the classes of [`WeightReport::ratios`], but for the last.
const RATIO_BOUNDS: [f64; 6] = [0.5, 0.8, 0.95, 1.05, 1.25, 2.0];

/// Counts and sums over the tokens that an objective weighted. A ratio is `exp(now - drawn)`. An
/// estimate of a KL divergence in nats is `exp(d) - d - 1`, with `d = other - now`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WeightReport {
    pub tokens: usize,
    /// Tokens that an objective dropped, see `objective::WeightedTokens`.
    pub dropped: usize,
    /// Tokens with a weight beyond `objective::WEIGHT_MAX`.
    pub clipped: usize,
    /// Tokens with a log-probability when drawn, by their ratio.
    pub ratios: [usize; RATIO_BOUNDS.len() + 1],
    pub ratio_sum: f64,
    /// The sum of the estimated divergence from the weights that drew the tokens.
    pub drift_sum: f64,
    /// Tokens with a log-probability by the reference.
    pub referenced: usize,
    /// The sum of the estimated divergence from the reference.
    pub divergence_sum: f64,
}

/// The objective of a training, with the signal of each sequence.
pub(super) struct TrainingWeights {
    objective: Objective,
    signals: Vec<TrainingSignal>,
    /// The number of scored tokens of each sequence.
    scored: Vec<usize>,
}

impl TrainingWeights {
    /// Takes the signals of all examples, and the example and the number of scored tokens of each
    /// sequence. Returns the indices of the sequences that are kept: in a loss of pairs, those
    /// whose partner was not skipped.
    pub(super) fn new(
        objective: Objective,
        signals: Vec<TrainingSignal>,
        sequences: &[(usize, usize)],
    ) -> Result<(Self, Vec<usize>), TrainError> {
        let unit = if matches!(objective.loss(), ObjectiveLoss::Pairs(_)) { 2 } else { 1 };
        let has = |example: usize| sequences.binary_search_by_key(&example, |it| it.0).is_ok();
        let partner = |example: usize| if unit == 2 { example ^ 1 } else { example };
        let kept: Vec<usize> =
            (0..sequences.len()).filter(|index| has(partner(sequences[*index].0))).collect();
        let mut weights = Self { objective, signals: Vec::new(), scored: Vec::new() };
        for (example, scored) in kept.iter().map(|index| sequences[*index]) {
            let signal = signals.get(example).cloned().unwrap_or_default();
            weights.check_signal(&signal, example + 1, scored)?;
            weights.signals.push(signal);
            weights.scored.push(scored);
        }
        Ok((weights, kept))
    }

    fn check_signal(
        &self,
        signal: &TrainingSignal,
        line: usize,
        tokens: usize,
    ) -> Result<(), TrainError> {
        let needs = self.objective.requirements();
        let lists = [
            ("behaviour", &signal.behaviour, Requirement::BehaviourLogprobs),
            ("old", &signal.old, Requirement::BehaviourLogprobs),
            ("reference", &signal.reference, Requirement::ReferenceLogprobs),
        ];
        for (what, list, requirement) in lists {
            let is_other = what == "old" || (what == "behaviour" && signal.old.is_some());
            match list {
                Some(list) if list.len() != tokens => {
                    let found = list.len();
                    return Err(TrainError::SignalLength { line, what, found, tokens });
                }
                None if needs.contains(&requirement) && !is_other => {
                    let objective = self.objective.name().as_str();
                    return Err(TrainError::Signal { line, what, objective });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the number of sequences that belong together.
    pub(super) fn unit(&self) -> usize {
        if matches!(self.objective.loss(), ObjectiveLoss::Pairs(_)) { 2 } else { 1 }
    }

    /// Counts what the loss of a batch is a mean over. The mean gain is that of the policy that
    /// drew the sequences.
    pub(super) fn total_batch(&self, batch: &[usize]) -> BatchTotals {
        let gain = |index: &usize| {
            let signal = &self.signals[*index];
            let before = signal.old.as_ref().or(signal.behaviour.as_ref());
            before.map_or(0.0, |now| SequenceLogprobs { now, ..signal.logprobs(&[]) }.gain())
        };
        BatchTotals {
            sequences: batch.len(),
            tokens: batch.iter().map(|index| self.scored[*index]).sum(),
            pairs: batch.len() / 2,
            mean_gain: batch.iter().map(gain).sum::<f64>() / batch.len().max(1) as f64,
        }
    }

    /// Returns the weight of each scored token of some sequences of a batch, by their losses in
    /// nats.
    pub(super) fn weigh_tokens(
        &self,
        sequences: &[usize],
        losses: &[f64],
        totals: &BatchTotals,
        report: &mut WeightReport,
    ) -> Vec<f64> {
        let now: Vec<f64> = losses.iter().map(|loss| -loss).collect();
        let mut rest = now.as_slice();
        let logprobs: Vec<SequenceLogprobs<'_>> = sequences
            .iter()
            .map(|index| {
                let (own, others) = rest.split_at(self.scored[*index]);
                rest = others;
                self.signals[*index].logprobs(own)
            })
            .collect();
        let mut weights = Vec::with_capacity(losses.len());
        for (indices, logprobs) in sequences.chunks(self.unit()).zip(logprobs.chunks(self.unit())) {
            let found: Vec<WeightedTokens> = match logprobs {
                [chosen, rejected] => {
                    self.objective.weigh_pair([*chosen, *rejected], totals).into()
                }
                _ => {
                    let single = indices.iter().zip(logprobs).map(|(index, logprobs)| {
                        let advantage = self.signals[*index].advantage;
                        self.objective.weigh_sequence(advantage, *logprobs, totals)
                    });
                    single.collect()
                }
            };
            for (logprobs, found) in logprobs.iter().zip(found) {
                report.add_sequence(logprobs, &found);
                weights.extend(found.weights);
            }
        }
        weights
    }
}

impl TrainingSignal {
    fn logprobs<'a>(&'a self, now: &'a [f64]) -> SequenceLogprobs<'a> {
        SequenceLogprobs {
            now,
            old: self.old.as_deref(),
            behaviour: self.behaviour.as_deref(),
            reference: self.reference.as_deref(),
        }
    }
}

impl WeightReport {
    fn add_sequence(&mut self, logprobs: &SequenceLogprobs<'_>, found: &WeightedTokens) {
        self.tokens += logprobs.now.len();
        self.dropped += found.dropped;
        self.clipped += found.clipped;
        for (now, drawn) in
            logprobs.now.iter().zip(logprobs.old.or(logprobs.behaviour).unwrap_or(&[]))
        {
            let ratio = (now - drawn).exp();
            self.ratios[RATIO_BOUNDS.partition_point(|bound| *bound <= ratio)] += 1;
            self.ratio_sum += ratio;
            self.drift_sum += estimate_divergence(*now, *drawn);
        }
        for (now, reference) in logprobs.now.iter().zip(logprobs.reference.unwrap_or(&[])) {
            self.referenced += 1;
            self.divergence_sum += estimate_divergence(*now, *reference);
        }
    }

    /// Adds the counts and sums of another report.
    pub fn add(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.dropped += other.dropped;
        self.clipped += other.clipped;
        for (sum, count) in self.ratios.iter_mut().zip(other.ratios) {
            *sum += count;
        }
        self.ratio_sum += other.ratio_sum;
        self.drift_sum += other.drift_sum;
        self.referenced += other.referenced;
        self.divergence_sum += other.divergence_sum;
    }
}

/// Estimates the KL divergence of the present weights from others by one token (J. Schulman's k3).
fn estimate_divergence(now: f64, other: f64) -> f64 {
    let apart = other - now;
    apart.exp_m1() - apart
}
