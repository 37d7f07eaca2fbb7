//! The worker's side of the embedded engine: one training, from files to files.

use std::{
    path::Path,
    sync::mpsc::{self, RecvTimeoutError},
    time::{Duration, Instant},
};

use agent::{CallInbox, CallResponder};
use anyhow::{Context, bail};
use engine::{
    CanaryText, CompletionExample, CompletionTokens, Device, LanguageModel, LayerModule,
    LearningRateDecay, LoraAdapter, LoraSpec, MatrixDtype, ModelTokenizer, ModelTrainer,
    TrainMethod, TrainSpec, WeightReport, score_completions,
};
use objective::Objective;
use wire::v1;

use crate::{
    checkpoint_schedule::CheckpointSchedule,
    messages::{
        CHECKPOINT_DIR, ResumeCheckpoint, STATE_DIR, TrainOutcome, TrainProgress, TrainRequest,
        TrainSlice, TrainStep, TrainingBegun, UNPUBLISHED_MAX,
    },
    signals::{DatasetSignal, SignalInputs},
};

/// The directory of the new adapter, if a slice has no steps.
pub(crate) const NEW_ADAPTER_DIR: &str = "0";

/// PyTorch's default.
const ADAM_EPSILON: f64 = 1e-8;

/// If the order sets no tokens of one pass.
const MICRO_BATCH_TOKENS: usize = 4096;

const PUBLISHING_POLL: Duration = Duration::from_millis(20);

/// Far below the agent's timeout.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);

/// Half an hour of heartbeats; a longer operation counts as hung.
const HEARTBEATS_MAX: u32 = 900;

/// The device that trains, and the weight type of the frozen base.
struct ComputeSettings {
    device: Device,
    dtype: MatrixDtype,
}

/// Answers one train request from standard input, and returns; after a slice, waits for the next
/// slice of the same training, until standard input ends.
pub fn run_train_worker(device: &str, dtype: MatrixDtype) {
    let inbox: CallInbox<TrainRequest> = CallInbox::read_stdin();
    let mut kept = None;
    while let Some(call) = inbox.next() {
        match run_training(&call.request, device, dtype, &call.responder, kept.take()) {
            Ok(trainer) => {
                kept = Some(trainer);
                call.responder.send_reply(&TrainOutcome { stopped_at: None });
            }
            Err(error) => call.responder.send_error(&format!("{error:#}")),
        }
        if call.request.slice.is_none() {
            return;
        }
    }
}

/// Returns the trainer after the last step. `kept` is that of another slice of the same training.
fn run_training(
    call: &TrainRequest,
    device: &str,
    dtype: MatrixDtype,
    respond: &CallResponder,
    kept: Option<ModelTrainer>,
) -> anyhow::Result<ModelTrainer> {
    let loading = Instant::now();
    // Adapters are not trained on weights of 8 bits.
    let dtype = if dtype == MatrixDtype::Q8_0 { MatrixDtype::Bf16 } else { dtype };
    let compute = ComputeSettings { device: engine::parse_device(device)?, dtype };
    let (mut trainer, before) = match &call.slice {
        Some(slice) => (start_slice(call, slice, &compute, respond, kept)?, None),
        None => start_trainer(call, &compute, respond)?,
    };
    if let Some(slice) = call.slice.as_ref().filter(|slice| slice.steps == 0) {
        answer_without_steps(&trainer, call, slice, respond)?;
        return Ok(trainer);
    }
    // The speed of a box is that of its steps.
    let began = if call.slice.is_some() { Instant::now() } else { loading };
    let steps = to_u32(trainer.total_steps());
    let last = last_step(call, steps);
    let TrainRequest { training, policy, .. } = call;
    let mut schedule =
        CheckpointSchedule::new(steps, training.save_every, policy.save_s, before.is_some());
    let mut tokens = before.map_or(0, |resume| resume.tokens);
    let mut trained_tokens = before.map_or(0, |resume| resume.trained_tokens);
    let spent = before.map_or(0.0, |resume| resume.wall_s);
    // The values of the steps since the last saved one.
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    let mut weighting: Option<WeightReport> = None;
    // The memory of another device is not known.
    let is_on_cpu = compute.device.is_cpu();
    while trainer.completed_steps() < last as usize
        && let Some(report) = trainer.run_step()?
    {
        tokens += report.tokens as u64;
        trained_tokens += report.scored as u64;
        losses.push(report.loss);
        norms.push(report.grad_norm);
        if let Some(weights) = &report.weights {
            weighting.get_or_insert_default().add(weights);
        }
        let (step, steps) = (to_u32(report.step), to_u32(report.steps));
        let due = match &call.slice {
            Some(_) => step == last,
            None => schedule.is_due(step, began.elapsed().as_secs_f64()),
        };
        let saved = due.then(|| call.out.join(step.to_string()));
        if let Some(directory) = &saved {
            let is_last = step == steps && call.slice.is_none();
            let save = || save_step(&trainer, call, directory, is_last);
            with_heartbeats(respond, save)
                .with_context(|| format!("save {}", directory.display()))?;
        }
        respond.send_progress(&TrainProgress::Step(TrainStep {
            step,
            steps,
            loss: mean_value(&losses),
            learning_rate: report.learning_rate,
            grad_norm: mean_value(&norms),
            grad_norm_max: norms.iter().copied().fold(0.0, f64::max),
            tokens,
            trained_tokens,
            // This engine does not pad.
            packing: 1.0,
            wall_s: spent + began.elapsed().as_secs_f64(),
            saved,
            canary: match step == steps && call.slice.is_none() {
                true => score_canary(&trainer, call)?,
                false => Vec::new(),
            },
            weighting: weighting.as_ref().map(weighting_message),
            peak_memory_bytes: if is_on_cpu { hardware::peak_memory_bytes() } else { 0 },
        }));
        if due {
            schedule.record_save(began.elapsed().as_secs_f64());
            (losses, norms, weighting) = (Vec::new(), Vec::new(), None);
        }
    }
    Ok(trainer)
}

/// Returns the number of steps before the end of the slice, or else of the training.
fn last_step(call: &TrainRequest, steps: u32) -> u32 {
    let end = |slice: &TrainSlice| steps.min(slice.first.saturating_add(slice.steps));
    call.slice.as_ref().map_or(steps, end)
}

/// Reports the likelihood of the held-out completions or the canary's log-probabilities, or saves the
/// new adapter.
fn answer_without_steps(
    trainer: &ModelTrainer,
    call: &TrainRequest,
    slice: &TrainSlice,
    respond: &CallResponder,
) -> anyhow::Result<()> {
    if slice.canary {
        let logprobs = with_heartbeats(respond, || score_canary(trainer, call))?;
        respond.send_progress(&TrainProgress::Canary(logprobs));
        return Ok(());
    }
    let Some(heldout) = &slice.heldout else {
        return save_step(trainer, call, &call.out.join(NEW_ADAPTER_DIR), true);
    };
    let nll = with_heartbeats(respond, || score_heldout(trainer, call, heldout))?;
    respond.send_progress(&TrainProgress::Heldout(nll));
    Ok(())
}

/// Starts from the beginning if the request's checkpoint cannot be used, which only takes longer.
/// Returns the trainer and the checkpoint that it resumed from.
fn start_trainer<'a>(
    call: &'a TrainRequest,
    compute: &ComputeSettings,
    respond: &CallResponder,
) -> anyhow::Result<(ModelTrainer, Option<&'a ResumeCheckpoint>)> {
    let mut refused = None;
    if let Some(resume) = &call.resume {
        let checkpoint = Some(resume.checkpoint.as_path());
        let loaded = load_trainer(call, compute, checkpoint, respond).and_then(|mut trainer| {
            trainer.resume_from(&resume.state, resume.step as usize)?;
            Ok(trainer)
        });
        match loaded {
            Ok(trainer) => {
                respond.send_progress(&begun_message(&trainer, resume.step, None));
                return Ok((trainer, Some(resume)));
            }
            Err(error) => refused = Some(format!("{error:#}")),
        }
    }
    let trainer = load_trainer(call, compute, None, respond)?;
    respond.send_progress(&begun_message(&trainer, 0, refused));
    Ok((trainer, None))
}

/// Starts with a new optimizer state if that of the request cannot be used.
fn start_slice(
    call: &TrainRequest,
    slice: &TrainSlice,
    compute: &ComputeSettings,
    respond: &CallResponder,
    kept: Option<ModelTrainer>,
) -> anyhow::Result<ModelTrainer> {
    let mut trainer = match (kept, &slice.start) {
        (Some(mut trainer), Some(start)) => {
            let adapter = LoraAdapter::load_peft(start, trainer.trained_model().model_config());
            trainer.replace_adapter(&adapter.context("load the adapter")?)?;
            trainer
        }
        _ => load_trainer(call, compute, slice.start.as_deref(), respond)?,
    };
    let refused = trainer.start_slice(slice.state.as_deref(), slice.first as usize).err();
    if refused.is_some() {
        trainer.start_slice(None, slice.first as usize)?;
    }
    if slice.own_schedule {
        trainer.schedule_slice(slice.steps as usize);
    }
    let refused = refused.map(|error| format!("{:#}", anyhow::Error::from(error)));
    respond.send_progress(&begun_message(&trainer, slice.first, refused));
    Ok(trainer)
}

fn begun_message(trainer: &ModelTrainer, step: u32, refused: Option<String>) -> TrainProgress {
    let (engine, skipped) = (engine::ENGINE.to_owned(), to_u32(trainer.skipped_examples()));
    let steps = to_u32(trainer.total_steps());
    TrainProgress::Begun(TrainingBegun { step, refused, engine, skipped, steps })
}

/// Loads the weights of a checkpoint, or of the request's adapter or base.
fn load_trainer(
    call: &TrainRequest,
    compute: &ComputeSettings,
    checkpoint: Option<&Path>,
    respond: &CallResponder,
) -> anyhow::Result<ModelTrainer> {
    let ComputeSettings { device, dtype } = compute;
    let tokenizer = ModelTokenizer::load_tokenizer(&call.base).context("load the tokenizer")?;
    let is_full = call.training.lora.is_none();
    let model = match checkpoint.filter(|_| is_full) {
        Some(checkpoint) => {
            LanguageModel::load_f32(checkpoint, device).context("load the checkpoint")?
        }
        None if call.random_init => {
            LanguageModel::init_from_directory(&call.base, call.seed, device)
                .context("initialise the model")?
        }
        None if is_full => {
            LanguageModel::load_f32(&call.base, device).context("load the base model")?
        }
        None => LanguageModel::load_with_dtype(&call.base, device, *dtype)
            .context("load the base model")?,
    };
    let method = training_method(call, checkpoint.or(call.adapter.as_deref()), &model)?;
    let (examples, given) = read_examples(&call.dataset)?;
    let signals = match &call.training.objective {
        Some(message) => {
            let objective = Objective::from_message(message)?;
            let inputs = SignalInputs { call, model: &model, tokenizer: &tokenizer, device };
            let signals =
                with_heartbeats(respond, || inputs.build_signals(&objective, &examples, given));
            Some((objective, signals?))
        }
        None => None,
    };
    let mut trainer = ModelTrainer::new(model, &tokenizer, method, &examples, train_spec(call)?)?;
    if let Some((objective, signals)) = signals {
        trainer = trainer.use_objective(objective, signals)?;
    }
    Ok(trainer)
}

/// Saves the optimizer's state as well, unless the step is the last one.
fn save_step(
    trainer: &ModelTrainer,
    call: &TrainRequest,
    directory: &Path,
    is_last: bool,
) -> anyhow::Result<()> {
    wait_for_publishing(&call.out);
    trainer.save_directory(&directory.join(CHECKPOINT_DIR), &call.base_name)?;
    if !is_last {
        trainer.save_state(&directory.join(STATE_DIR))?;
    }
    Ok(())
}

/// Scores the canary text with the trained weights; empty without a canary. The log-probabilities
/// identify generators that have these weights loaded.
fn score_canary(trainer: &ModelTrainer, call: &TrainRequest) -> anyhow::Result<Vec<f32>> {
    if call.canary.is_empty() {
        return Ok(Vec::new());
    }
    let tokenizer = ModelTokenizer::load_tokenizer(&call.base).context("load the tokenizer")?;
    let config = trainer.trained_model().model_config();
    let canary = CanaryText::from_text(&tokenizer, config, &call.canary, wire::CANARY_TOKENS_MAX)?;
    trainer.score_canary(&canary).context("score the order's canary")
}

/// Returns the mean negative log-likelihood of held-out completions with the slice's adapter, in nats
/// per token; `None` if it is not finite, or all completions are too long.
fn score_heldout(
    trainer: &ModelTrainer,
    call: &TrainRequest,
    heldout: &Path,
) -> anyhow::Result<Option<f64>> {
    let start = call.slice.as_ref().and_then(|slice| slice.start.as_ref());
    let start = start.context("the slice names no start (E111)")?;
    let base = trainer.trained_model();
    let adapter = LoraAdapter::load_peft(start, base.model_config()).context("load the adapter")?;
    let model = base.with_adapter(&adapter)?;
    let tokenizer = ModelTokenizer::load_tokenizer(&call.base).context("load the tokenizer")?;
    let (examples, _) = read_examples(heldout)?;
    let most = call.training.max_tokens as usize;
    let scores = score_completions(&model, &tokenizer, &examples, most, |_, _| {})?;
    let scores: Vec<f64> = scores.into_iter().flatten().flatten().collect();
    Ok(Some(-mean_value(&scores)).filter(|nll| nll.is_finite() && !scores.is_empty()))
}

/// The agent removes the saved steps that it has published, so the disk does not fill.
fn wait_for_publishing(out: &Path) {
    let unpublished = || std::fs::read_dir(out).map_or(0, Iterator::count);
    while unpublished() > UNPUBLISHED_MAX {
        std::thread::sleep(PUBLISHING_POLL);
    }
}

/// Runs `work` and sends heartbeats meanwhile, at most [`HEARTBEATS_MAX`]. Saving takes longer than
/// a step on a slow disk or network, and must not count as a hang.
fn with_heartbeats<T>(respond: &CallResponder, work: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        let (working, ended) = mpsc::channel::<()>();
        scope.spawn(move || {
            for _ in 0..HEARTBEATS_MAX {
                if ended.recv_timeout(HEARTBEAT_INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                respond.send_progress(&TrainProgress::Busy);
            }
        });
        let done = work();
        drop(working);
        done
    })
}

#[expect(clippy::cast_precision_loss, reason = "counts of tokens")]
fn weighting_message(report: &WeightReport) -> v1::checkpoint::Weighting {
    let mean = |sum: f64, count: usize| (count > 0).then(|| sum / count as f64);
    let compared = report.ratios.iter().sum();
    v1::checkpoint::Weighting {
        tokens: report.tokens as u64,
        dropped: report.dropped as u64,
        clipped: report.clipped as u64,
        ratio: mean(report.ratio_sum, compared),
        drift: mean(report.drift_sum, compared),
        divergence: mean(report.divergence_sum, report.referenced),
        ratios: match compared {
            0 => Vec::new(),
            _ => report.ratios.iter().map(|count| *count as u64).collect(),
        },
    }
}

/// Returns 0 for an empty list.
#[expect(clippy::cast_precision_loss, reason = "a count of steps")]
fn mean_value(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn training_method(
    call: &TrainRequest,
    adapter: Option<&Path>,
    model: &LanguageModel,
) -> anyhow::Result<TrainMethod> {
    let Some(lora) = &call.training.lora else { return Ok(TrainMethod::Full) };
    if let Some(path) = adapter {
        let adapter =
            LoraAdapter::load_peft(path, model.model_config()).context("load the adapter")?;
        return Ok(TrainMethod::Continue(adapter));
    }
    let modules = lora.target_modules.iter().map(|name| {
        LayerModule::from_name(name).with_context(|| {
            format!(
                "field lora.target_modules: {name:?} is not a module of this \
                                      model"
            )
        })
    });
    let modules = modules.collect::<anyhow::Result<_>>()?;
    Ok(TrainMethod::Lora(LoraSpec {
        rank: lora.r as usize,
        alpha: lora.alpha,
        rslora: false,
        modules,
    }))
}

fn train_spec(call: &TrainRequest) -> anyhow::Result<TrainSpec> {
    let training = &call.training;
    let decay = match training.schedule() {
        v1::Schedule::Constant => LearningRateDecay::Constant,
        v1::Schedule::Linear => LearningRateDecay::Linear,
        v1::Schedule::Cosine => LearningRateDecay::Cosine,
        v1::Schedule::Unspecified => bail!("field training.schedule is not set (E111)"),
    };
    Ok(TrainSpec {
        learning_rate: training.learning_rate,
        warmup_ratio: training.warmup_ratio,
        decay,
        final_ratio: training.final_ratio,
        betas: (training.beta1, training.beta2),
        epsilon: ADAM_EPSILON,
        weight_decay: training.weight_decay,
        dropout: training.lora.as_ref().map_or(0.0, |lora| lora.dropout),
        freezes_a: training.lora.as_ref().is_some_and(|lora| lora.freeze_a),
        clip_norm: training.max_grad_norm,
        batch_size: training.batch_size as usize,
        micro_batch_tokens: match training.micro_batch_tokens {
            _ if !training.packing.unwrap_or(true) => 1,
            0 => MICRO_BATCH_TOKENS,
            some => some as usize,
        },
        gradient_checkpointing: call.policy.gradient_checkpointing,
        epochs: training.epochs as usize,
        max_steps: (training.max_steps > 0).then_some(training.max_steps as usize),
        max_tokens: training.max_tokens as usize,
        seed: call.seed,
    })
}

/// Returns the examples, and what the dataset says of each.
fn read_examples(path: &Path) -> anyhow::Result<(Vec<CompletionExample>, Vec<DatasetSignal>)> {
    let text = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let examples = wire::TrainingExample::parse_all(&text).context("read the dataset")?;
    let split = |example: wire::TrainingExample| {
        let tokens = match example.token_ids {
            Some(tokens) if !example.masked.is_empty() => {
                let range = |[start, end]: [u32; 2]| start as usize..end as usize;
                let masked = example.masked.into_iter().map(range).collect();
                CompletionTokens::Masked { tokens, masked }
            }
            Some(ids) => CompletionTokens::Exact(ids),
            None if example.unfinished => CompletionTokens::Cut,
            None => CompletionTokens::Ended,
        };
        let wire::TrainingExample { prompt, completion, advantage, behaviour, teacher, .. } =
            example;
        let signal = DatasetSignal { advantage, behaviour, teacher };
        (CompletionExample { prompt, completion, tokens }, signal)
    };
    Ok(examples.into_iter().map(split).unzip())
}

/// Larger values become the maximum.
fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_observations_of_an_episode_are_masked() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("dataset.jsonl");
        let lines = concat!(
            r#"{"prompt":"p","completion":"ab<7>c","token_ids":[5,0,9,9,6,0],"masked":[[2,4]]}"#,
            "\n",
            r#"{"prompt":"p","completion":"ab","token_ids":[5,0]}"#,
            "\n",
            r#"{"prompt":"p","completion":"ab","unfinished":true}"#,
        );
        std::fs::write(&path, lines).unwrap();
        let (examples, signals) = read_examples(&path).unwrap();
        let tokens: Vec<CompletionTokens> = examples.into_iter().map(|one| one.tokens).collect();
        let masked = std::iter::once(2..4).collect();
        let expected = [
            CompletionTokens::Masked { tokens: vec![5, 0, 9, 9, 6, 0], masked },
            CompletionTokens::Exact(vec![5, 0]),
            CompletionTokens::Cut,
        ];
        assert_eq!((&tokens[..], signals.len()), (&expected[..], 3));
    }
}
