//! Full training and LoRA training on prompt and completion pairs. The loss counts only the
//! completion and its end-of-sequence token. On one class of machines, the same inputs give the
//! same bytes with any number of threads.

mod backward;
mod optimizer;
mod resume;
mod schedule;
mod weighting;

use crate::adapter::{AdapterError, LoraAdapter};
use crate::canary::{CanaryError, CanaryText};
use crate::dropout::LoraDropout;
use crate::model::weights::{DecoderWeights, ModelParameter};
use crate::model::{LanguageModel, MatrixDtype, ModelError, forward::TrainedAdapter};
use crate::ops::run_on_pool;
use crate::random::RandomStream;
use crate::sequence::{CompletionExample, SequenceError, TokenSequence};
use crate::tokenizer::{ModelTokenizer, TokenizerError};
use backward::{PackedBatch, ParameterGradients};
use candle_core::{Device, Tensor};
use formats::LoraSpec;
use objective::Objective;
use optimizer::AdamOptimizer;
pub use resume::ResumeError;
pub use schedule::LearningRateDecay;
use schedule::LearningRateSchedule;
use std::collections::BTreeMap;
use std::path::Path;
use weighting::TrainingWeights;
pub use weighting::{TrainingSignal, WeightReport};

/// The weights to train.
#[derive(Debug, Clone)]
pub enum TrainMethod {
    Full,
    Lora(LoraSpec),
    Continue(LoraAdapter),
}

/// The parameters of a training.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainSpec {
    /// The peak.
    pub learning_rate: f64,
    /// The share of the steps over which the rate rises linearly.
    pub warmup_ratio: f64,
    /// The shape after the warm-up.
    pub decay: LearningRateDecay,
    /// The end of the schedule (linear and cosine), one step after the last, as a share of
    /// `learning_rate`.
    pub final_ratio: f64,
    pub betas: (f64, f64),
    pub epsilon: f64,
    /// The decoupled weight decay of matrices, LoRA's A and B included; biases and norms have no
    /// decay.
    pub weight_decay: f64,
    /// The share of an adapter's inputs that is dropped in each step; from 0 to below 1.
    pub dropout: f64,
    /// True to train only B of an adapter; A keeps its values (FFA-LoRA, arXiv:2403.12313).
    pub freezes_a: bool,
    /// The largest global gradient norm; 0 for no limit.
    pub clip_norm: f64,
    /// The number of examples of an optimizer step; the last step of an epoch may have fewer.
    pub batch_size: usize,
    /// The largest number of tokens of one forward and backward pass. A batch is split into such
    /// parts, in which sequences are packed without padding. 1 packs no sequences together.
    pub micro_batch_tokens: usize,
    /// True to keep only the input of each layer for the backward pass, which recomputes the rest:
    /// less memory, more time, the same bytes (arXiv:1604.06174).
    pub gradient_checkpointing: bool,
    pub epochs: usize,
    /// The exact number of steps, over as many epochs as needed; `None` for `epochs`.
    pub max_steps: Option<usize>,
    /// The largest number of tokens of an example (prompt, completion and end); longer examples are
    /// skipped.
    pub max_tokens: usize,
    pub seed: u64,
}

impl Default for TrainSpec {
    /// Returns one epoch of AdamW at a constant rate of 0.001, without weight decay or dropout.
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            warmup_ratio: 0.0,
            decay: LearningRateDecay::Constant,
            final_ratio: 1.0,
            betas: (0.9, 0.999),
            epsilon: 1e-8,
            weight_decay: 0.0,
            dropout: 0.0,
            freezes_a: false,
            clip_norm: 1.0,
            batch_size: 4,
            micro_batch_tokens: 512,
            gradient_checkpointing: false,
            epochs: 1,
            max_steps: None,
            max_tokens: 512,
            seed: 1,
        }
    }
}

/// The measurements of an optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    pub step: usize,
    pub steps: usize,
    /// The mean loss over the scored tokens in nats, before the step.
    pub loss: f64,
    pub learning_rate: f64,
    /// All tokens of the step's examples.
    pub tokens: usize,
    pub scored: usize,
    pub grad_norm: f64,
    /// How an objective weighted the tokens; `None` if all weigh the same.
    pub weights: Option<WeightReport>,
}

/// The reason why a training cannot start or continue.
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
    FullBf16,
    #[error("a q8_0 model cannot be trained; load it as f32 or bf16 (M113)")]
    Quantized,
    #[error(
        "the model has an adapter beside it; train on the base, or continue training the adapter \
         (M113)"
    )]
    UnmergedAdapter,
    #[error("could not use the tokenizer with the model")]
    Tokenizer(#[from] TokenizerError),
    #[error("could not save the model")]
    Model(#[from] ModelError),
    #[error("could not use or save the adapter")]
    Adapter(#[from] AdapterError),
    #[error("example on line {line} has no {what}, which the objective {objective} needs (O102)")]
    Signal { line: usize, what: &'static str, objective: &'static str },
    #[error(
        "example on line {line} has {found} values in {what} for {tokens} scored tokens (O102)"
    )]
    SignalLength { line: usize, what: &'static str, found: usize, tokens: usize },
    #[error("tensor operation failed during training (X101)")]
    Tensor(#[from] candle_core::Error),
}

/// A training that takes one optimizer step at a time.
///
/// A step selects the examples of its batch, splits them into micro-batches, adds up their
/// gradients, clips them and updates the weights with AdamW. The order of the examples and the
/// dropout depend only on the seed and the step, so a training can be interrupted:
///
/// ```text
/// new -> run_step ... run_step -> save_directory + save_state
/// new (with the saved weights) -> resume_from -> run_step ... until None
/// ```
///
/// The resumed training gives the same bytes as an uninterrupted one.
pub struct ModelTrainer {
    model: LanguageModel,
    /// `None` to train the model itself.
    adapter: Option<LoraAdapter>,
    sequences: Vec<TokenSequence>,
    /// The example of each sequence, counted from 0.
    examples: Vec<usize>,
    skipped: usize,
    /// `None` to weigh all scored tokens the same.
    weights: Option<TrainingWeights>,
    spec: TrainSpec,
    schedule: LearningRateSchedule,
    /// A schedule of learning rates of its own, and the step at which it begins.
    slice_schedule: Option<(usize, LearningRateSchedule)>,
    optimizer: AdamOptimizer,
    step: usize,
}

impl ModelTrainer {
    /// Checks the parameters, tokenizes the examples and creates the optimizer.
    pub fn new(
        model: LanguageModel,
        tokenizer: &ModelTokenizer,
        method: TrainMethod,
        examples: &[CompletionExample],
        spec: TrainSpec,
    ) -> Result<Self, TrainError> {
        check_spec(&spec)?;
        let model = model.into_unpacked();
        check_model(&model, &method)?;
        tokenizer.check_fits(&model.config)?;
        let (examples_used, sequences): (Vec<usize>, Vec<TokenSequence>) =
            tokenize_examples(&model, tokenizer, examples, spec.max_tokens)?.into_iter().unzip();
        let skipped = examples.len() - sequences.len();
        let adapter = match method {
            TrainMethod::Full => None,
            TrainMethod::Lora(lora) => Some(LoraAdapter::new(&lora, &model.config, spec.seed)?),
            TrainMethod::Continue(adapter) => {
                adapter.check_fits(&model.config)?;
                Some(adapter)
            }
        };
        let adapter = adapter.map(|adapter| adapter.to_device(&model.device)).transpose()?;
        let schedule = plan_schedule(&spec, sequences.len());
        let optimizer = AdamOptimizer::new(spec.betas, spec.epsilon, spec.weight_decay);
        let examples = examples_used;
        let weights = None;
        Ok(Self {
            model,
            adapter,
            sequences,
            examples,
            skipped,
            weights,
            spec,
            schedule,
            slice_schedule: None,
            optimizer,
            step: 0,
        })
    }

    /// Continues with the values of another adapter of the same shape.
    ///
    /// # Errors
    /// When the adapter does not fit the model, or the model itself is trained.
    pub fn replace_adapter(&mut self, adapter: &LoraAdapter) -> Result<(), TrainError> {
        adapter.check_fits(&self.model.config)?;
        if self.adapter.is_none() {
            return Err(AdapterError::OtherModel.into());
        }
        self.adapter = Some(adapter.to_device(&self.model.device)?);
        Ok(())
    }

    /// Gives the next `steps` steps the learning rates of a training that has no others.
    pub fn schedule_slice(&mut self, steps: usize) {
        let steps = steps.min(self.schedule.steps - self.step);
        self.slice_schedule = Some((self.step, LearningRateSchedule { steps, ..self.schedule }));
    }

    /// Weighs tokens by an objective. `signals` has an entry for each example. For a loss of pairs,
    /// the examples are pairs of a better and a worse one, and a batch has `batch_size` pairs.
    ///
    /// # Errors
    /// When an example lacks what the objective needs, or none is left.
    pub fn use_objective(
        mut self,
        objective: Objective,
        signals: Vec<TrainingSignal>,
    ) -> Result<Self, TrainError> {
        let all = self.examples.iter().zip(&self.sequences);
        let scored = all.map(|(example, sequence)| (*example, sequence.scored_count()));
        let (weights, kept) =
            TrainingWeights::new(objective, signals, &scored.collect::<Vec<_>>())?;
        let mut kept_flags = vec![false; self.sequences.len()];
        kept.iter().for_each(|index| kept_flags[*index] = true);
        let mut flags = kept_flags.iter();
        self.sequences.retain(|_| flags.next() == Some(&true));
        let mut flags = kept_flags.iter();
        self.examples.retain(|_| flags.next() == Some(&true));
        if self.sequences.is_empty() {
            return Err(TrainError::NoExamples);
        }
        self.schedule = plan_schedule(&self.spec, self.sequences.len() / weights.unit());
        self.weights = Some(weights);
        Ok(self)
    }

    /// Returns the number of sequences that belong together: 2 in a loss of pairs.
    fn unit(&self) -> usize {
        self.weights.as_ref().map_or(1, TrainingWeights::unit)
    }

    /// Returns the number of examples that were too long.
    pub fn skipped_examples(&self) -> usize {
        self.skipped
    }

    /// Returns the number of optimizer steps of the whole training.
    pub fn total_steps(&self) -> usize {
        self.schedule.steps
    }

    /// Returns the number of steps before the next one.
    pub fn completed_steps(&self) -> usize {
        self.step
    }

    /// Takes one optimizer step; returns `None` if all are done.
    pub fn run_step(&mut self) -> Result<Option<StepReport>, TrainError> {
        if self.step == self.schedule.steps {
            return Ok(None);
        }
        run_on_pool(|| self.compute_step()).map(Some)
    }

    fn compute_step(&mut self) -> Result<StepReport, TrainError> {
        let indices = self.select_batch();
        let chosen: Vec<&TokenSequence> =
            indices.iter().map(|index| &self.sequences[*index]).collect();
        let scored: usize = chosen.iter().map(|sequence| sequence.scored_count()).sum();
        let tokens = chosen.iter().map(|sequence| sequence.tokens.len()).sum();
        let scale = 1.0 / scored.max(1) as f64;
        let totals = self.weights.as_ref().map(|weights| weights.total_batch(&indices));
        let mut report = WeightReport::default();
        let mut gradients = ParameterGradients::default();
        let cast = |adapter: &LoraAdapter| adapter.cast_matrices(self.model.matrix_dtype());
        let adapter = self.adapter.as_ref().map(cast).transpose()?;
        let mut total = 0.0;
        let mut packed = 0;
        for part in split_batch(&chosen, self.unit(), self.spec.micro_batch_tokens) {
            let batch = PackedBatch::pack_sequences(part, packed);
            let examples = &indices[packed..packed + part.len()];
            packed += part.len();
            let TrainSpec { dropout, seed, .. } = self.spec;
            let dropout = LoraDropout::for_step(dropout, seed, self.step, batch.token_places());
            let trained = |adapter| TrainedAdapter { adapter, dropout: dropout.as_ref() };
            let trained = adapter.as_ref().map(trained);
            let again = self.spec.gradient_checkpointing;
            let weigh = |losses: &[f64]| match (&self.weights, &totals) {
                (Some(weights), Some(totals)) => {
                    Ok(weights.weigh_tokens(examples, losses, totals, &mut report))
                }
                _ => Ok(vec![scale; losses.len()]),
            };
            total += gradients.add_batch(&self.model, trained, &batch, weigh, again)?;
        }
        if self.spec.freezes_a {
            gradients.retain_named(is_not_a);
        }
        let loss = total * scale;
        let grad_norm = gradients.global_norm()?;
        self.step += 1;
        for (what, found) in [("loss", loss), ("norm of the gradient", grad_norm)] {
            if !found.is_finite() {
                return Err(TrainError::Diverged { what, step: self.step, found });
            }
        }
        let clip = self.spec.clip_norm;
        let shrink = if clip > 0.0 && grad_norm > clip { clip / grad_norm } else { 1.0 };
        let factor = match self.slice_schedule {
            Some((first, schedule)) => schedule.rate_factor(self.step - first),
            None => self.schedule.rate_factor(self.step),
        };
        let learning_rate = self.spec.learning_rate * factor;
        self.update_parameters(&gradients, shrink, learning_rate)?;
        let (step, steps) = (self.step, self.schedule.steps);
        let weights = self.weights.is_some().then_some(report);
        Ok(StepReport { step, steps, loss, learning_rate, tokens, scored, grad_norm, weights })
    }

    /// Returns the indices of the next sequences. Each epoch visits every example once, in an order
    /// drawn from the seed and the number of the epoch.
    fn select_batch(&self) -> Vec<usize> {
        let unit = self.unit();
        let units = self.sequences.len() / unit;
        let steps = units.div_ceil(self.spec.batch_size);
        let (epoch, step) = (self.step / steps, self.step % steps);
        let mut order: Vec<usize> = (0..units).collect();
        RandomStream::for_part(self.spec.seed, &format!("epoch {epoch}")).shuffle_items(&mut order);
        let batch = order.into_iter().skip(step * self.spec.batch_size);
        let batch = batch.take(self.spec.batch_size);
        batch.flat_map(|first| first * unit..(first + 1) * unit).collect()
    }

    /// Multiplies gradients by `shrink` for clipping.
    fn update_parameters(
        &mut self,
        gradients: &ParameterGradients,
        shrink: f64,
        rate: f64,
    ) -> candle_core::Result<()> {
        let parameters = self.trained_parameters()?;
        let mut updated = self.optimizer.compute_update(&parameters, gradients, shrink, rate)?;
        match &mut self.adapter {
            Some(adapter) => {
                for (name, frozen) in adapter.named_parameters() {
                    updated.entry(name).or_insert(frozen);
                }
                adapter.replace_parameters(updated)
            }
            None => replace_weights(&mut self.model, updated),
        }
    }

    /// Returns the parameters that change, with their names.
    fn trained_parameters(&self) -> candle_core::Result<Vec<(String, Tensor)>> {
        match &self.adapter {
            Some(adapter) => {
                let mut named = adapter.named_parameters();
                named.retain(|(name, _)| !self.spec.freezes_a || is_not_a(name));
                Ok(named)
            }
            None => self.model.weights.named_tensors(),
        }
    }

    /// Returns the adapter as trained so far; `None` in a full training.
    pub fn trained_adapter(&self) -> Option<&LoraAdapter> {
        self.adapter.as_ref()
    }

    /// Returns the model as trained so far; in a LoRA training the unchanged base.
    pub fn trained_model(&self) -> &LanguageModel {
        &self.model
    }

    /// Returns the log-probabilities of a canary text with the weights trained so far.
    pub fn score_canary(&self, canary: &CanaryText) -> Result<Vec<f32>, CanaryError> {
        match &self.adapter {
            Some(adapter) => canary.score_tokens(&self.model.with_adapter(adapter)?),
            None => canary.score_tokens(&self.model),
        }
    }

    /// Writes a PEFT adapter directory, or in a full training a Hugging Face model directory.
    /// `base` is the name of the base model in the adapter's configuration.
    pub fn save_directory(&self, dir: &Path, base: &str) -> Result<(), TrainError> {
        match &self.adapter {
            Some(adapter) => adapter.to_device(&Device::Cpu)?.save_peft(dir, base)?,
            None => self.model.save_directory(dir)?,
        }
        Ok(())
    }
}

/// Plans the rates of a training on this many examples or pairs.
fn plan_schedule(spec: &TrainSpec, examples: usize) -> LearningRateSchedule {
    LearningRateSchedule {
        steps: spec.max_steps.unwrap_or(spec.epochs * examples.div_ceil(spec.batch_size)),
        warmup_ratio: spec.warmup_ratio,
        decay: spec.decay,
        final_ratio: spec.final_ratio,
    }
}

/// Returns false for the matrix A of an adapter.
fn is_not_a(name: &str) -> bool {
    !name.ends_with(".lora_A.weight")
}

fn replace_weights(
    model: &mut LanguageModel,
    mut updated: BTreeMap<String, Tensor>,
) -> candle_core::Result<()> {
    let dtype = model.dtype;
    model.weights = DecoderWeights::build(&model.config, dtype, |parameter: ModelParameter| {
        updated
            .remove(&parameter.name)
            .ok_or_else(|| candle_core::Error::msg(format!("`{}` got no update", parameter.name)))
    })?;
    Ok(())
}

fn check_model(model: &LanguageModel, method: &TrainMethod) -> Result<(), TrainError> {
    match method {
        _ if model.dtype == MatrixDtype::Q8_0 => Err(TrainError::Quantized),
        TrainMethod::Full if model.dtype == MatrixDtype::Bf16 => Err(TrainError::FullBf16),
        _ if model.unmerged_adapter.is_some() => Err(TrainError::UnmergedAdapter),
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

/// Returns sequences with the indices of their examples. Skips examples that are too long; fails if
/// none is left.
fn tokenize_examples(
    model: &LanguageModel,
    tokenizer: &ModelTokenizer,
    examples: &[CompletionExample],
    max_tokens: usize,
) -> Result<Vec<(usize, TokenSequence)>, TrainError> {
    let positions = model.config.max_positions;
    let most = max_tokens.min(positions);
    let mut sequences = Vec::with_capacity(examples.len());
    let mut shortest = None;
    for (index, example) in examples.iter().enumerate() {
        let sequence = TokenSequence::from_example(tokenizer, &model.config, example)
            .map_err(|source| TrainError::Example { line: index + 1, source })?;
        let tokens = sequence.tokens.len();
        if tokens <= most {
            sequences.push((index, sequence));
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

/// Splits a batch into parts of at most `most` tokens, or of one longer unit of sequences that
/// belong together.
fn split_batch<'a, 'b>(
    sequences: &'a [&'b TokenSequence],
    unit: usize,
    most: usize,
) -> Vec<&'a [&'b TokenSequence]> {
    let mut parts = Vec::new();
    let (mut start, mut tokens) = (0, 0);
    for (number, together) in sequences.chunks(unit).enumerate() {
        let index = number * unit;
        let more: usize = together.iter().map(|sequence| sequence.tokens.len()).sum();
        if index > start && tokens + more > most {
            parts.push(&sequences[start..index]);
            (start, tokens) = (index, 0);
        }
        tokens += more;
    }
    parts.push(&sequences[start..]);
    parts
}
