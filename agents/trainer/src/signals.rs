//! What an objective knows of each example: its advantage, and the log-probabilities of its
//! completion before the training and by the reference.

use anyhow::Context;
use engine::{
    CompletionExample, Device, LanguageModel, LoraAdapter, ModelTokenizer, TrainingSignal,
    score_completions,
};
use objective::{Objective, Requirement};

use crate::messages::TrainRequest;

/// The values that the dataset has of an example.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct DatasetSignal {
    pub(crate) advantage: Option<f64>,
    /// The log-probability of each token when it was drawn, in nats.
    pub(crate) behaviour: Option<Vec<f64>>,
    /// The log-probability of each token by the teacher, in nats.
    pub(crate) teacher: Option<Vec<f64>>,
}

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
    /// training starts, and with the base as the reference. A teacher has scored them before. An
    /// example without an advantage has 1.
    ///
    /// # Errors
    /// When a file cannot be read, or a completion cannot be scored.
    pub(crate) fn build_signals(
        &self,
        objective: &Objective,
        examples: &[CompletionExample],
        given: Vec<DatasetSignal>,
    ) -> anyhow::Result<Vec<TrainingSignal>> {
        let distills = objective.uses_teacher();
        let needs_reference = objective.requirements().contains(&Requirement::ReferenceLogprobs);
        let none = || vec![None; examples.len()];
        let old = match objective.scores_before_training() {
            true => self.score_examples(examples, true).context("score before the training")?,
            false => none(),
        };
        let reference = match needs_reference && !distills {
            true => self.score_examples(examples, false).context("score with the base")?,
            false => none(),
        };
        let signals = given.into_iter().zip(old).zip(reference);
        Ok(signals
            .map(|((given, old), reference)| TrainingSignal {
                advantage: given.advantage.unwrap_or(1.0),
                behaviour: given.behaviour.filter(|_| objective.uses_drawn_logprobs()),
                old,
                reference: reference.or(given.teacher.filter(|_| distills)),
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
        Ok(score_completions(model, self.tokenizer, examples, max_tokens, |_, _| {})?)
    }
}
