//! The worker's side: one training, from files to files.

use std::{
    path::Path,
    sync::mpsc::{self, RecvTimeoutError},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use engine::{
    Adapter, Canary, Decay, Device, Dtype, Example, LoraSpec, Method, Model, Module, Tokenizer,
    TrainSpec, Trainer,
};
use runtime::{Inbox, Responder};
use wire::v1;

use crate::{
    cadence::Cadence,
    calls::{Begun, CHECKPOINT, Progress, Resume, STATE, Step, Train, Trained, UNPUBLISHED_MAX},
};

/// Adam's epsilon, as PyTorch has it.
const EPSILON: f64 = 1e-8;

/// Tokens of one pass when the order leaves it to the engine.
const MICRO_BATCH_TOKENS: usize = 4096;

/// Between two looks whether the agent has published.
const PUBLISHING_POLL: Duration = Duration::from_millis(20);

/// Between two signs of life: well below what the agent bears of silence.
const SIGN_EVERY: Duration = Duration::from_secs(2);

/// Half an hour of them; then whatever goes on is a hang after all.
const SIGNS_MAX: u32 = 900;

/// Where trainings compute, and what the weights they leave alone are held as.
struct Place {
    device: Device,
    dtype: Dtype,
}

/// Answers one training call and ends.
pub fn work(device: &str, dtype: Dtype) {
    let inbox: Inbox<Train> = Inbox::open();
    if let Some(call) = inbox.next() {
        match train(&call.request, device, dtype, &call.respond) {
            Ok(()) => call.respond.reply(&Trained { stopped_at: None }),
            Err(error) => call.respond.error(&format!("{error:#}")),
        }
    }
}

fn train(call: &Train, device: &str, dtype: Dtype, respond: &Responder) -> anyhow::Result<()> {
    let began = Instant::now();
    let place = Place { device: engine::parse_device(device)?, dtype };
    let (mut trainer, before) = begin(call, &place, respond)?;
    let steps = count(trainer.steps());
    let Train { training, policy, .. } = call;
    let mut cadence = Cadence::new(steps, training.save_every, policy.save_s, before.is_some());
    let mut tokens = before.map_or(0, |resume| resume.tokens);
    let mut trained_tokens = before.map_or(0, |resume| resume.trained_tokens);
    let spent = before.map_or(0.0, |resume| resume.wall_s);
    // Of the steps since the last saved one.
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    while let Some(report) = trainer.step()? {
        tokens += report.tokens as u64;
        trained_tokens += report.scored as u64;
        losses.push(report.loss);
        norms.push(report.grad_norm);
        let (step, steps) = (count(report.step), count(report.steps));
        let due = cadence.due(step, began.elapsed().as_secs_f64());
        let saved = due.then(|| call.out.join(step.to_string()));
        if let Some(directory) = &saved {
            let save = || save(&trainer, call, directory, step == steps);
            with_signs_of_life(respond, save)
                .with_context(|| format!("save {}", directory.display()))?;
        }
        respond.progress(&Progress::Step(Step {
            step,
            steps,
            loss: mean(&losses),
            learning_rate: report.learning_rate,
            grad_norm: mean(&norms),
            grad_norm_max: norms.iter().copied().fold(0.0, f64::max),
            tokens,
            trained_tokens,
            // This engine pads nothing.
            packing: 1.0,
            wall_s: spent + began.elapsed().as_secs_f64(),
            saved,
            canary: if step == steps { canary(&trainer, call)? } else { Vec::new() },
        }));
        if due {
            cadence.saved(began.elapsed().as_secs_f64());
            (losses, norms) = (Vec::new(), Vec::new());
        }
    }
    Ok(())
}

/// Goes on from the checkpoint the call names, if that can be done; otherwise from the start,
/// which only takes longer.
fn begin<'a>(
    call: &'a Train,
    place: &Place,
    respond: &Responder,
) -> anyhow::Result<(Trainer, Option<&'a Resume>)> {
    let mut refused = None;
    if let Some(resume) = &call.resume {
        match load(call, place, Some(resume)) {
            Ok(trainer) => {
                respond.progress(&begun(&trainer, resume.step, None));
                return Ok((trainer, Some(resume)));
            }
            Err(error) => refused = Some(format!("{error:#}")),
        }
    }
    let trainer = load(call, place, None)?;
    respond.progress(&begun(&trainer, 0, refused));
    Ok((trainer, None))
}

fn begun(trainer: &Trainer, step: u32, refused: Option<String>) -> Progress {
    let (engine, skipped) = (engine::ENGINE.to_owned(), count(trainer.skipped()));
    Progress::Begun(Begun { step, refused, engine, skipped })
}

fn load(call: &Train, place: &Place, resume: Option<&Resume>) -> anyhow::Result<Trainer> {
    let Place { device, dtype } = place;
    let tokenizer = Tokenizer::load(&call.base).context("load the tokenizer")?;
    let checkpoint = resume.map(|resume| resume.checkpoint.as_path());
    let is_full = call.training.lora.is_none();
    let model = match checkpoint.filter(|_| is_full) {
        Some(checkpoint) => Model::load(checkpoint, device).context("load the checkpoint")?,
        None if call.random_init => {
            Model::init_from(&call.base, call.seed, device).context("initialise the model")?
        }
        None if is_full => Model::load(&call.base, device).context("load the base model")?,
        None => Model::load_as(&call.base, device, *dtype).context("load the base model")?,
    };
    let method = method(call, checkpoint.or(call.adapter.as_deref()), &model)?;
    let examples = read_examples(&call.dataset)?;
    let mut trainer = Trainer::new(model, &tokenizer, method, &examples, spec(call)?)?;
    if let Some(resume) = resume {
        trainer.resume(&resume.state, resume.step as usize)?;
    }
    Ok(trainer)
}

fn save(trainer: &Trainer, call: &Train, directory: &Path, is_last: bool) -> anyhow::Result<()> {
    await_publishing(&call.out);
    trainer.save(&directory.join(CHECKPOINT), &call.base_name)?;
    if !is_last {
        trainer.save_state(&directory.join(STATE))?;
    }
    Ok(())
}

/// What shows whoever generates with these weights.
fn canary(trainer: &Trainer, call: &Train) -> anyhow::Result<Vec<f32>> {
    if call.canary.is_empty() {
        return Ok(Vec::new());
    }
    let tokenizer = Tokenizer::load(&call.base).context("load the tokenizer")?;
    let config = trainer.model().config();
    let canary = Canary::read(&tokenizer, config, &call.canary, wire::CANARY_TOKENS)?;
    trainer.canary(&canary).context("score the order's canary")
}

/// The agent removes what it has published; the disk must not fill with what it has not.
fn await_publishing(out: &Path) {
    let unpublished = || std::fs::read_dir(out).map_or(0, Iterator::count);
    while unpublished() > UNPUBLISHED_MAX {
        std::thread::sleep(PUBLISHING_POLL);
    }
}

/// Disks and networks are slow at another scale than steps are: while they are waited for, the
/// agent is told that this is no hang, for a bounded time.
fn with_signs_of_life<T>(respond: &Responder, work: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        let (working, ended) = mpsc::channel::<()>();
        scope.spawn(move || {
            for _ in 0..SIGNS_MAX {
                if ended.recv_timeout(SIGN_EVERY) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                respond.progress(&Progress::Busy);
            }
        });
        let done = work();
        drop(working);
        done
    })
}

#[expect(clippy::cast_precision_loss, reason = "a count of steps")]
fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn method(call: &Train, adapter: Option<&Path>, model: &Model) -> anyhow::Result<Method> {
    let Some(lora) = &call.training.lora else { return Ok(Method::Full) };
    if let Some(path) = adapter {
        let adapter = Adapter::load(path, model.config()).context("load the adapter")?;
        return Ok(Method::Continue(adapter));
    }
    let modules = lora.target_modules.iter().map(|name| {
        Module::from_name(name)
            .with_context(|| format!("field lora.target_modules: {name:?} is no module"))
    });
    let modules = modules.collect::<anyhow::Result<_>>()?;
    Ok(Method::Lora(LoraSpec { rank: lora.r as usize, alpha: lora.alpha, rslora: false, modules }))
}

fn spec(call: &Train) -> anyhow::Result<TrainSpec> {
    let training = &call.training;
    let decay = match training.schedule() {
        v1::Schedule::Constant => Decay::Constant,
        v1::Schedule::Linear => Decay::Linear,
        v1::Schedule::Cosine => Decay::Cosine,
        v1::Schedule::Unspecified => bail!("field training.schedule is not set (E111)"),
    };
    Ok(TrainSpec {
        learning_rate: training.learning_rate,
        warmup_ratio: training.warmup_ratio,
        decay,
        final_ratio: training.final_ratio,
        betas: (training.beta1, training.beta2),
        epsilon: EPSILON,
        weight_decay: training.weight_decay,
        dropout: training.lora.as_ref().map_or(0.0, |lora| lora.dropout),
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

fn read_examples(path: &Path) -> anyhow::Result<Vec<Example>> {
    let text = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let examples = wire::Example::parse_all(&text).context("read the dataset")?;
    let examples = examples
        .into_iter()
        .map(|wire::Example { prompt, completion }| Example { prompt, completion });
    Ok(examples.collect())
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
