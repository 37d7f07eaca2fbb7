//! What an objective knows of each example: its advantage, and the log-probabilities of its
//! completion before the training and by the reference.

use anyhow::Context;
use engine::{
    CompletionExample, Device, LanguageModel, LoraAdapter, ModelTokenizer, ScoredDocument,
    TrainingSignal, score_completions,
};
use objective::{Objective, Recipe, Requirement};

use crate::messages::TrainRequest;

/// The files and the model of a training.
pub(crate) struct SignalInputs<'a> {
    pub(crate) call: &'a TrainRequest,
    /// The model to train, without its adapter. In a full training it may be a checkpoint to resume
    /// from.
    pub(crate) model: &'a LanguageModel,
    pub(crate) tokenizer: &'a ModelTokenizer,
    pub(crate) device: &'a Device,
}

impl SignalInputs<'_> {
    /// Scores the completions as far as the objective needs it: with the weights from which the
    /// training starts, which drew the samples, and with the base as the reference. An example
    /// without an advantage has 1.
    ///
    /// # Errors
    /// When a file cannot be read, or a completion cannot be scored.
    pub(crate) fn build_signals(
        &self,
        objective: &Objective,
        examples: &[CompletionExample],
        advantages: &[Option<f64>],
    ) -> anyhow::Result<Vec<TrainingSignal>> {
        let needs = objective.requirements();
        let none = || vec![None; examples.len()];
        // The mean gain on the reference is a baseline there.
        let has_baseline = matches!(objective.recipe(), Recipe::Desirable(_));
        let old = match needs.contains(&Requirement::BehaviourLogprobs) || has_baseline {
            true => self.score_examples(examples, true).context("score before the training")?,
            false => none(),
        };
        let reference = match needs.contains(&Requirement::ReferenceLogprobs) {
            true => self.score_examples(examples, false).context("score with the base")?,
            false => none(),
        };
        let signals = advantages.iter().zip(old).zip(reference);
        Ok(signals
            .map(|((advantage, old), reference)| TrainingSignal {
                advantage: advantage.unwrap_or(1.0),
                behaviour: None,
                old,
                reference,
            })
            .collect())
    }

    /// Scores with the base, and with the adapter from which the training starts if
    /// `with_adapter`.
    fn score_examples(
        &self,
        examples: &[CompletionExample],
        with_adapter: bool,
    ) -> anyhow::Result<Vec<Option<Vec<f64>>>> {
        let documents = examples.iter().map(|CompletionExample { prompt, completion }| {
            ScoredDocument { prompt: prompt.clone(), completion: completion.clone() }
        });
        let documents: Vec<ScoredDocument> = documents.collect();
        let TrainRequest { base, adapter, training, resume, .. } = self.call;
        let base = match resume {
            Some(_) if training.lora.is_none() => {
                &LanguageModel::load_f32(base, self.device).context("load the base model")?
            }
            _ => self.model,
        };
        let adapter = adapter.as_ref().filter(|_| with_adapter && training.lora.is_some());
        let model = match adapter {
            Some(path) => {
                let adapter = LoraAdapter::load_peft(path, base.model_config());
                &base.with_adapter(&adapter.context("load the adapter")?)?
            }
            None => base,
        };
        let max_tokens = training.max_tokens as usize;
        Ok(score_completions(model, self.tokenizer, &documents, max_tokens, |_, _| {})?)
    }
}
