//! The weights of all tokens of a set of sequences.

use std::collections::BTreeMap;

use crate::{
    Advantage, BatchTotals, Objective, Requirement, SequenceLogprobs, SettingError, WeightedTokens,
    batch::to_f64, pairs::find_pairs,
};

/// A sequence with its reward and the log-probabilities of its tokens, in nats.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoredSequence {
    /// Sequences of one prompt are a group.
    pub prompt_id: String,
    pub reward: f64,
    /// Of the model that is trained, in this pass.
    pub logprobs: Vec<f64>,
    /// Of the policy that drew the sequence, by the engine that drew it.
    pub behaviour: Option<Vec<f64>>,
    /// Of the policy that drew the sequence, by the engine that trains; `logprobs` if absent.
    pub old: Option<Vec<f64>>,
    /// Of the reference model or the teacher.
    pub reference: Option<Vec<f64>>,
}

/// The weights of the tokens of all sequences.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenWeights {
    /// A weight for each token of each sequence, in order: `-∂loss/∂logprob`.
    pub weights: Vec<Vec<f64>>,
    /// The number of sequences that do not count, because a log-probability is not finite.
    pub voided: usize,
    /// The number of weights that were beyond [`crate::WEIGHT_MAX`].
    pub clipped: usize,
}

/// The error that an objective has no weights for these sequences. `index` counts from 0.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WeightError {
    #[error(transparent)]
    Setting(#[from] SettingError),
    #[error("sequence {} has no {what}, which {objective} needs (O102)", index + 1)]
    Missing { index: usize, what: &'static str, objective: &'static str },
    #[error(
        "sequence {} has {found} values in {what} for {tokens} tokens; it needs one a token (O102)",
        index + 1
    )]
    WrongLength { index: usize, what: &'static str, found: usize, tokens: usize },
    #[error(
        "prompt {prompt_id:?} has a single sequence, and {objective} compares the sequences of a \
         prompt; draw at least 2 (O102)"
    )]
    LonelySequence { prompt_id: String, objective: &'static str },
}

/// Computes the weights of all tokens: the negative derivative of the objective's loss by each
/// log-probability. The loss is the mean over the sequences, pairs or tokens, as the objective
/// defines.
///
/// Sequences with a log-probability that is not finite have weights of 0 and do not count.
///
/// # Errors
/// When a setting is missing, or the sequences lack something that the objective needs.
pub fn compute_weights(
    objective: &Objective,
    sequences: &[ScoredSequence],
) -> Result<TokenWeights, WeightError> {
    objective.check_settings()?;
    check_requirements(objective, sequences)?;
    let counted: Vec<usize> =
        (0..sequences.len()).filter(|index| sequences[*index].is_finite()).collect();
    let batch = Batch { objective, sequences, counted };
    let found = match objective.loss().advantage() {
        Some(advantage) => batch.weigh_sequences(advantage),
        None => batch.weigh_pairs(),
    };
    let voided = sequences.len() - batch.counted.len();
    let mut weights: Vec<Vec<f64>> = sequences.iter().map(|it| vec![0.0; it.tokens()]).collect();
    let mut clipped = 0;
    for (index, found) in found {
        clipped += found.clipped;
        for (sum, weight) in weights[index].iter_mut().zip(found.weights) {
            *sum += weight;
        }
    }
    Ok(TokenWeights { weights, voided, clipped })
}

struct Batch<'a> {
    objective: &'a Objective,
    sequences: &'a [ScoredSequence],
    /// The indices of the sequences that count.
    counted: Vec<usize>,
}

impl Batch<'_> {
    /// Returns the indices of each prompt's sequences.
    fn groups(&self) -> Vec<Vec<usize>> {
        let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for index in &self.counted {
            groups.entry(&self.sequences[*index].prompt_id).or_default().push(*index);
        }
        groups.into_values().collect()
    }

    fn rewards(&self, group: &[usize]) -> Vec<f64> {
        group.iter().map(|index| self.sequences[*index].reward).collect()
    }

    fn totals(&self) -> BatchTotals {
        let each = || self.counted.iter().map(|index| &self.sequences[*index]);
        let gain: f64 = each().map(|sequence| sequence.logprobs().gain()).sum();
        BatchTotals {
            sequences: self.counted.len(),
            tokens: each().map(ScoredSequence::tokens).sum(),
            pairs: 0,
            mean_gain: gain / to_f64(self.counted.len()),
        }
    }

    /// Returns the weights of sequences by index.
    fn weigh_sequences(&self, advantage: Advantage) -> Vec<(usize, WeightedTokens)> {
        let totals = self.totals();
        let groups = self.groups().into_iter().filter(|group| group.len() >= advantage.group_min());
        let weigh = |group: Vec<usize>| {
            let advantages = advantage.compute_advantages(&self.rewards(&group));
            let weigh = |(index, advantage): (usize, f64)| {
                let logprobs = self.sequences[index].logprobs();
                (index, self.objective.weigh_sequence(advantage, logprobs, &totals))
            };
            group.into_iter().zip(advantages).map(weigh).collect::<Vec<_>>()
        };
        groups.flat_map(weigh).collect()
    }

    /// Returns the weights of the sequences of each pair.
    fn weigh_pairs(&self) -> Vec<(usize, WeightedTokens)> {
        let pairs_of = |group: &Vec<usize>| {
            let pairs = find_pairs(&self.rewards(group)).into_iter();
            pairs.map(|pair| [group[pair.chosen], group[pair.rejected]]).collect::<Vec<_>>()
        };
        let pairs: Vec<[usize; 2]> = self.groups().iter().flat_map(pairs_of).collect();
        let totals = BatchTotals { pairs: pairs.len(), ..self.totals() };
        let weigh = |pair: [usize; 2]| {
            let logprobs = pair.map(|index| self.sequences[index].logprobs());
            pair.into_iter().zip(self.objective.weigh_pair(logprobs, &totals))
        };
        pairs.into_iter().flat_map(weigh).collect()
    }
}

impl ScoredSequence {
    fn tokens(&self) -> usize {
        self.logprobs.len()
    }

    /// Returns each list of log-probabilities that is there, with its name in files.
    fn lists(&self) -> impl Iterator<Item = (&'static str, &[f64])> {
        let others =
            [("behaviour", &self.behaviour), ("old", &self.old), ("reference", &self.reference)];
        let others = others.into_iter().filter_map(|(name, list)| Some((name, list.as_deref()?)));
        std::iter::once(("logprobs", self.logprobs.as_slice())).chain(others)
    }

    fn is_finite(&self) -> bool {
        self.lists().all(|(_, list)| list.iter().all(|logprob| logprob.is_finite()))
    }

    fn logprobs(&self) -> SequenceLogprobs<'_> {
        SequenceLogprobs {
            now: &self.logprobs,
            old: self.old.as_deref(),
            behaviour: self.behaviour.as_deref(),
            reference: self.reference.as_deref(),
        }
    }
}

fn check_requirements(
    objective: &Objective,
    sequences: &[ScoredSequence],
) -> Result<(), WeightError> {
    let name = objective.name().as_str();
    let needs = objective.requirements();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, sequence) in sequences.iter().enumerate() {
        *counts.entry(&sequence.prompt_id).or_default() += 1;
        let tokens = sequence.tokens();
        if let Some((what, list)) = sequence.lists().find(|(_, list)| list.len() != tokens) {
            return Err(WeightError::WrongLength { index, what, found: list.len(), tokens });
        }
        let missing = |what| Err(WeightError::Missing { index, what, objective: name });
        let has_old = sequence.behaviour.is_some() || sequence.old.is_some();
        if needs.contains(&Requirement::BehaviourLogprobs) && !has_old {
            return missing("behaviour");
        }
        if objective.has_correction() && sequence.behaviour.is_none() {
            return missing("behaviour");
        }
        if needs.contains(&Requirement::ReferenceLogprobs) && sequence.reference.is_none() {
            return missing("reference");
        }
    }
    let lonely = counts.into_iter().find(|(_, count)| *count < 2);
    match lonely.filter(|_| needs.contains(&Requirement::Groups)) {
        Some((prompt_id, _)) => {
            Err(WeightError::LonelySequence { prompt_id: prompt_id.to_owned(), objective: name })
        }
        None => Ok(()),
    }
}
