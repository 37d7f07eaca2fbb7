//! Training from scratch and LoRA training over prompt and completion pairs; the loss counts the
//! completion and its end-of-sequence token only. Same inputs give the same bytes on one machine
//! class, whatever the thread count.

mod backward;
mod optimizer;
mod resume;
mod schedule;

use crate::adapter::{Adapter, AdapterError};
use crate::canary::{Canary, CanaryError};
use crate::dropout::Dropout;
use crate::model::weights::{Parameter, Weights};
use crate::model::{Dtype, Model, ModelError, forward::Trained};
use crate::ops::on_pool;
use crate::random::Random;
use crate::sequence::{Sequence, SequenceError};
use crate::tokenizer::{Tokenizer, TokenizerError};
use backward::{Batch, Gradients};
use candle_core::{Device, Tensor};
use formats::LoraSpec;
use optimizer::Optimizer;
pub use resume::ResumeError;
pub use schedule::Decay;
use schedule::Schedule;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    pub prompt: String,
    pub completion: String,
}

/// What is trained.
#[derive(Debug, Clone)]
pub enum Method {
    /// Every weight of the model.
    Full,
    /// A new adapter, its A matrices drawn from the train seed.
    Lora(LoraSpec),
    /// An existing adapter goes on, with a fresh optimizer.
    Continue(Adapter),
}

#[derive(Debug, Clone, PartialEq)]
pub struct TrainSpec {
    pub learning_rate: f64,
    /// Share of the steps over which the rate climbs linearly.
    pub warmup_ratio: f64,
    pub decay: Decay,
    /// Where the schedule ends, one step behind the last, as a share of `learning_rate` (linear
    /// and cosine).
    pub final_ratio: f64,
    pub betas: (f64, f64),
    pub epsilon: f64,
    /// Decoupled; matrices only (never biases or norms), LoRA's A and B included.
    pub weight_decay: f64,
    /// Of what an adapter's pairs read, the share that they do not see in a step; 0 to below 1.
    pub dropout: f64,
    /// Global gradient norm limit; 0 switches it off.
    pub clip_norm: f64,
    /// Examples per optimizer step; an epoch's last step may have fewer.
    pub batch_size: usize,
    /// Token bound of one forward and backward pass; a step's batch is cut into such parts, in
    /// which sequences are packed one after another without padding. 1 packs none.
    pub micro_batch_tokens: usize,
    /// Keeps only what goes into each layer for the backward pass, which computes the rest anew:
    /// less memory, more time, the same bytes (arXiv:1604.06174).
    pub gradient_checkpointing: bool,
    pub epochs: usize,
    /// Takes exactly this many steps, over as many epochs as that needs.
    pub max_steps: Option<usize>,
    /// Bound on prompt, completion and end token of one example; longer ones are left out.
    pub max_tokens: usize,
    pub seed: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// From 1.
    pub step: usize,
    pub steps: usize,
    /// Mean over the scored tokens, before the step.
    pub loss: f64,
    pub learning_rate: f64,
    /// All tokens passed through the model in this step.
    pub tokens: usize,
    /// Of them, those whose prediction is scored.
    pub scored: usize,
    /// Before clipping.
    pub grad_norm: f64,
}

#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error("there are no examples to train on (R113)")]
    NoExamples,
    #[error("train parameter `{field}` is {found}, expected {expected} (R113)")]
    Spec { field: &'static str, found: String, expected: &'static str },
    #[error(
        "all {examples} examples are longer than the {most} tokens allowed, the shortest has {shortest}; raise training.max_tokens (the model has {positions} positions) (R113)"
    )]
    TooLong { examples: usize, most: usize, shortest: usize, positions: usize },
    #[error("example on line {line} could not be read")]
    Example { line: usize, source: SequenceError },
    #[error("the {what} of step {step} is {found}; lower training.learning_rate (R113)")]
    Diverged { what: &'static str, step: usize, found: f64 },
    #[error(
        "every weight of a bf16 model cannot be trained; load it as f32, or train an adapter (M113)"
    )]
    Narrow,
    #[error(
        "the model has an adapter beside it; train on the base, or go on with the adapter (M113)"
    )]
    Beside,
    #[error("could not use the tokenizer with the model")]
    Tokenizer(#[from] TokenizerError),
    #[error("could not save the model")]
    Model(#[from] ModelError),
    #[error("could not use or save the adapter")]
    Adapter(#[from] AdapterError),
    #[error("tensor operation failed during training (X101)")]
    Tensor(#[from] candle_core::Error),
}

/// Takes one optimizer step at a time.
pub struct Trainer {
    model: Model,
    /// `None` trains the model itself.
    adapter: Option<Adapter>,
    sequences: Vec<Sequence>,
    skipped: usize,
    spec: TrainSpec,
    schedule: Schedule,
    optimizer: Optimizer,
    step: usize,
}

impl Trainer {
    pub fn new(
        model: Model,
        tokenizer: &Tokenizer,
        method: Method,
        examples: &[Example],
        spec: TrainSpec,
    ) -> Result<Self, TrainError> {
        check_spec(&spec)?;
        check_model(&model, &method)?;
        tokenizer.check_fits(&model.config)?;
        let sequences = read_examples(&model, tokenizer, examples, spec.max_tokens)?;
        let skipped = examples.len() - sequences.len();
        let adapter = match method {
            Method::Full => None,
            Method::Lora(lora) => Some(Adapter::new(&lora, &model.config, spec.seed)?),
            Method::Continue(adapter) => {
                adapter.check_fits(&model.config)?;
                Some(adapter)
            }
        };
        let adapter = adapter.map(|adapter| adapter.to_device(&model.device)).transpose()?;
        let epoch = sequences.len().div_ceil(spec.batch_size);
        let schedule = Schedule {
            steps: spec.max_steps.unwrap_or(spec.epochs * epoch),
            warmup_ratio: spec.warmup_ratio,
            decay: spec.decay,
            final_ratio: spec.final_ratio,
        };
        let optimizer = Optimizer::new(spec.betas, spec.epsilon, spec.weight_decay);
        Ok(Self { model, adapter, sequences, skipped, spec, schedule, optimizer, step: 0 })
    }

    /// Examples left out, being too long.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Optimizer steps this run takes in all.
    pub fn steps(&self) -> usize {
        self.schedule.steps
    }

    /// One optimizer step; `None` when all are done.
    pub fn step(&mut self) -> Result<Option<StepReport>, TrainError> {
        if self.step == self.schedule.steps {
            return Ok(None);
        }
        on_pool(|| self.take_step()).map(Some)
    }

    fn take_step(&mut self) -> Result<StepReport, TrainError> {
        let chosen = self.batch_of_step();
        let scored: usize = chosen.iter().map(|sequence| sequence.scored.len()).sum();
        let tokens = chosen.iter().map(|sequence| sequence.tokens.len()).sum();
        let scale = 1.0 / scored.max(1) as f64;
        let mut gradients = Gradients::default();
        let cast = |adapter: &Adapter| adapter.cast(self.model.precision());
        let adapter = self.adapter.as_ref().map(cast).transpose()?;
        let mut total = 0.0;
        let mut packed = 0;
        for part in parts(&chosen, self.spec.micro_batch_tokens) {
            let batch = Batch::pack(part, packed);
            packed += part.len();
            let TrainSpec { dropout, seed, .. } = self.spec;
            let dropout = Dropout::of_step(dropout, seed, self.step, batch.places());
            let trained = |adapter| Trained { adapter, dropout: dropout.as_ref() };
            let trained = adapter.as_ref().map(trained);
            let again = self.spec.gradient_checkpointing;
            total += gradients.add_batch(&self.model, trained, &batch, scale, again)?;
        }
        let loss = total * scale;
        let grad_norm = gradients.norm()?;
        self.step += 1;
        for (what, found) in [("loss", loss), ("norm of the gradient", grad_norm)] {
            if !found.is_finite() {
                return Err(TrainError::Diverged { what, step: self.step, found });
            }
        }
        let clip = self.spec.clip_norm;
        let shrink = if clip > 0.0 && grad_norm > clip { clip / grad_norm } else { 1.0 };
        let learning_rate = self.spec.learning_rate * self.schedule.factor(self.step);
        self.update(&gradients, shrink, learning_rate)?;
        let (step, steps) = (self.step, self.schedule.steps);
        Ok(StepReport { step, steps, loss, learning_rate, tokens, scored, grad_norm })
    }

    /// Each epoch visits every example once, in an order drawn from the seed and its number.
    fn batch_of_step(&self) -> Vec<&Sequence> {
        let steps = self.sequences.len().div_ceil(self.spec.batch_size);
        let (epoch, step) = (self.step / steps, self.step % steps);
        let mut order: Vec<usize> = (0..self.sequences.len()).collect();
        Random::of_part(self.spec.seed, &format!("epoch {epoch}")).shuffle(&mut order);
        let batch = order.into_iter().skip(step * self.spec.batch_size);
        batch.take(self.spec.batch_size).map(|index| &self.sequences[index]).collect()
    }

    fn update(&mut self, gradients: &Gradients, shrink: f64, rate: f64) -> candle_core::Result<()> {
        let parameters = parameters(&self.model, self.adapter.as_ref())?;
        let updated = self.optimizer.update(&parameters, gradients, shrink, rate)?;
        match &mut self.adapter {
            Some(adapter) => adapter.replace(updated),
            None => replace_weights(&mut self.model, updated),
        }
    }

    /// The adapter as trained so far; `None` under [`Method::Full`].
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// The model as trained so far; under LoRA the untouched base.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What the model as trained so far thinks of a text.
    ///
    /// # Errors
    /// When it cannot be computed.
    pub fn canary(&self, canary: &Canary) -> Result<Vec<f32>, CanaryError> {
        match &self.adapter {
            Some(adapter) => canary.score(&self.model.with_adapter(adapter)?),
            None => canary.score(&self.model),
        }
    }

    /// Writes a PEFT adapter directory naming the base's directory, or under [`Method::Full`] a
    /// Hugging Face model directory.
    /// `base` is what an adapter's configuration calls the model it belongs to.
    pub fn save(&self, dir: &Path, base: &str) -> Result<(), TrainError> {
        match &self.adapter {
            Some(adapter) => adapter.to_device(&Device::Cpu)?.save(dir, base)?,
            None => self.model.save(dir)?,
        }
        Ok(())
    }
}

/// What is trained, by name.
fn parameters(
    model: &Model,
    adapter: Option<&Adapter>,
) -> candle_core::Result<Vec<(String, Tensor)>> {
    match adapter {
        Some(adapter) => Ok(adapter.named()),
        None => model.weights.tensors(),
    }
}

fn replace_weights(
    model: &mut Model,
    mut updated: BTreeMap<String, Tensor>,
) -> candle_core::Result<()> {
    model.weights = Weights::build(&model.config, |parameter: Parameter| {
        updated
            .remove(&parameter.name)
            .ok_or_else(|| candle_core::Error::msg(format!("`{}` got no update", parameter.name)))
    })?;
    Ok(())
}

fn check_model(model: &Model, method: &Method) -> Result<(), TrainError> {
    match method {
        Method::Full if model.dtype == Dtype::Bf16 => Err(TrainError::Narrow),
        _ if model.beside.is_some() => Err(TrainError::Beside),
        _ => Ok(()),
    }
}

fn check_spec(spec: &TrainSpec) -> Result<(), TrainError> {
    let share = |value: f64| (0.0..=1.0).contains(&value);
    let not_negative = |value: f64| value.is_finite() && value >= 0.0;
    let (first, second) = spec.betas;
    let checks = [
        ("learning_rate", not_negative(spec.learning_rate), spec.learning_rate, "0 or more"),
        ("warmup_ratio", share(spec.warmup_ratio), spec.warmup_ratio, "0 to 1"),
        ("final_ratio", share(spec.final_ratio), spec.final_ratio, "0 to 1"),
        ("betas", share(first) && first < 1.0, first, "0 to below 1"),
        ("betas", share(second) && second < 1.0, second, "0 to below 1"),
        ("epsilon", not_negative(spec.epsilon), spec.epsilon, "0 or more"),
        ("weight_decay", not_negative(spec.weight_decay), spec.weight_decay, "0 or more"),
        ("dropout", share(spec.dropout) && spec.dropout < 1.0, spec.dropout, "0 to below 1"),
        ("clip_norm", not_negative(spec.clip_norm), spec.clip_norm, "0 or more"),
        ("batch_size", spec.batch_size > 0, spec.batch_size as f64, "1 or more"),
        ("epochs", spec.epochs > 0 || spec.max_steps.is_some(), 0.0, "1 or more, or max_steps"),
    ];
    match checks.into_iter().find(|(_, fine, ..)| !fine) {
        Some((field, _, found, expected)) => {
            Err(TrainError::Spec { field, found: found.to_string(), expected })
        }
        None => Ok(()),
    }
}

/// Those that are not too long.
fn read_examples(
    model: &Model,
    tokenizer: &Tokenizer,
    examples: &[Example],
    max_tokens: usize,
) -> Result<Vec<Sequence>, TrainError> {
    let positions = model.config.max_positions;
    let most = max_tokens.min(positions);
    let mut sequences = Vec::with_capacity(examples.len());
    let mut shortest = None;
    for (Example { prompt, completion }, line) in examples.iter().zip(1..) {
        let sequence = Sequence::of_pair(tokenizer, &model.config, prompt, completion)
            .map_err(|source| TrainError::Example { line, source })?;
        let tokens = sequence.tokens.len();
        if tokens <= most {
            sequences.push(sequence);
        } else {
            shortest = Some(shortest.map_or(tokens, |before: usize| before.min(tokens)));
        }
    }
    match shortest {
        _ if !sequences.is_empty() => Ok(sequences),
        Some(shortest) => {
            Err(TrainError::TooLong { examples: examples.len(), most, shortest, positions })
        }
        None => Err(TrainError::NoExamples),
    }
}

/// Cuts a batch into runs of at most `most` tokens, or of one sequence.
fn parts<'a, 'b>(sequences: &'a [&'b Sequence], most: usize) -> Vec<&'a [&'b Sequence]> {
    let mut parts = Vec::new();
    let (mut start, mut tokens) = (0, 0);
    for (index, sequence) in sequences.iter().enumerate() {
        if index > start && tokens + sequence.tokens.len() > most {
            parts.push(&sequences[start..index]);
            (start, tokens) = (index, 0);
        }
        tokens += sequence.tokens.len();
    }
    parts.push(&sequences[start..]);
    parts
}
