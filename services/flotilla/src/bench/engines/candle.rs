//! The embedded engine, in a worker process a task.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, bail};
use engine::{
    Decay, Dtype, Example, Generator, LoraSpec, Method, Module, Prompt, Request, Sampling,
    TrainSpec, Trainer,
};

use super::{
    BATCH, CHUNKS, CONTEXT, LENGTH, Model, NEW, PREFILL, PROMPT, Runner, STEPS, Said, Speed, Task,
    child, path_text, speed,
};
use crate::output;

/// This program, as a worker.
pub(super) struct Worker<'a> {
    program: PathBuf,
    model: &'a Model,
    threads: usize,
}

impl<'a> Worker<'a> {
    pub(super) fn new(model: &'a Model, threads: usize) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("find this program")?;
        Ok(Self { program, model, threads })
    }
}

impl Runner for Worker<'_> {
    fn name(&self) -> &str {
        engine::ENGINE
    }

    fn speed(&self, task: Task) -> anyhow::Result<Option<Speed>> {
        let Model { directory, text, .. } = self.model;
        let mut command = Command::new(&self.program);
        command.args(["worker", "bench", "--task", &task.name()]);
        command.args(["--model", &path_text(directory), "--text", &path_text(text)]);
        command.env("RAYON_NUM_THREADS", self.threads.to_string());
        speed(task, &child::run(&mut command)?).map(Some)
    }
}

/// The worker's side: does one task and says how fast.
pub(crate) fn work(model: &Path, text: &Path, task: &str) -> anyhow::Result<()> {
    let Some(task) = Task::parse(task) else { bail!("--task {task}: no such task") };
    let tokens_per_s = match task {
        Task::Prefill => generate(model, 1, PREFILL, 1)?.0,
        Task::Decode(sequences) => generate(model, sequences, PROMPT, NEW + 1)?.1,
        Task::Perplexity => perplexity(model, text)?,
        Task::Train => train(model, false)?,
        Task::TrainAnew => train(model, true)?,
    };
    output::print_json(&Said { tokens_per_s })
}

/// Tokens a second of prefill, and of decoding.
fn generate(
    model: &Path,
    sequences: usize,
    prompt: usize,
    new: usize,
) -> anyhow::Result<(f64, f64)> {
    let (model, tokenizer) = engine::load(model, None, "cpu", Dtype::Bf16)?;
    let mut generator = Generator::new(model, tokenizer, sequences);
    for first in 0..sequences {
        let tokens = (0..prompt).map(|n| ((first * prompt + n) % 256) as u32).collect();
        let sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, max_new_tokens: new };
        let seeds = vec![0];
        generator.admit(Request { tag: (), prompt: Prompt::Tokens(tokens), seeds, sampling })?;
    }
    let began = Instant::now();
    // The first step is the prefill of all prompts and draws each one's first token.
    generator.step()?;
    let prefill = (sequences * prompt) as f64 / began.elapsed().as_secs_f64();
    let (began, mut decoded) = (Instant::now(), 0);
    while !generator.is_idle() {
        for completion in generator.step()? {
            // The first was the prefill's.
            decoded += completion.tokens.len() - 1;
        }
    }
    let decode = decoded as f64 / began.elapsed().as_secs_f64();
    Ok((prefill, decode))
}

/// The caller counts the whole process's time.
fn perplexity(model: &Path, text: &Path) -> anyhow::Result<f64> {
    let (model, tokenizer) = engine::load(model, None, "cpu", Dtype::Bf16)?;
    let text = std::fs::read_to_string(text).context("read the text")?;
    let figures = engine::chunks(&model, &tokenizer, &text, CONTEXT, Some(CHUNKS), |_, _| {})?;
    Ok(figures.tokens as f64)
}

fn train(model: &Path, gradient_checkpointing: bool) -> anyhow::Result<f64> {
    let (model, tokenizer) = engine::load(model, None, "cpu", Dtype::Bf16)?;
    // One token a byte, and the end token.
    let half = |letter: char, length| std::iter::repeat_n(letter, length).collect::<String>();
    let example = Example { prompt: half('p', LENGTH / 2), completion: half('c', LENGTH / 2 - 1) };
    let modules = Module::ALL.into_iter().collect();
    let method = Method::Lora(LoraSpec { rank: 16, alpha: 32.0, modules, rslora: false });
    let spec = TrainSpec {
        learning_rate: 1e-4,
        warmup_ratio: 0.0,
        decay: Decay::Constant,
        final_ratio: 1.0,
        betas: (0.9, 0.999),
        epsilon: 1e-8,
        weight_decay: 0.0,
        dropout: 0.0,
        clip_norm: 1.0,
        batch_size: BATCH,
        micro_batch_tokens: BATCH * LENGTH,
        gradient_checkpointing,
        epochs: 1,
        max_steps: Some(STEPS + 1),
        max_tokens: LENGTH,
        seed: 1,
    };
    let mut trainer = Trainer::new(model, &tokenizer, method, &vec![example; BATCH], spec)?;
    trainer.step()?;
    let (began, mut tokens) = (Instant::now(), 0);
    while let Some(report) = trainer.step()? {
        tokens += report.tokens;
    }
    Ok(tokens as f64 / began.elapsed().as_secs_f64())
}
