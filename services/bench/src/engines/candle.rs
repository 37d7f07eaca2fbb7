//! Runs the embedded engine, in a worker process for each task.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, bail};
use cli::output;
use engine::{
    BatchGenerator, CompletionExample, LayerModule, LoraSpec, MatrixDtype, ModelTrainer,
    PromptInput, PromptRequest, SamplingParameters, TrainMethod, TrainSpec,
};

use super::{
    BATCH, BenchModel, CHUNKS, CONTEXT, EngineRunner, EngineTask, LENGTH, MachineSpeed, NEW,
    PREFILL, PROMPT, STEPS, TaskOutput, TaskSpeed, path_text, task_process, task_speed,
};

pub(super) struct CandleRunner<'a> {
    program: PathBuf,
    model: &'a BenchModel,
    threads: usize,
}

impl<'a> CandleRunner<'a> {
    pub(super) fn new(model: &'a BenchModel, threads: usize) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("find this program")?;
        Ok(Self { program, model, threads })
    }
}

impl EngineRunner for CandleRunner<'_> {
    fn engine_name(&self) -> &str {
        engine::ENGINE
    }

    fn measure_speed(&self, task: EngineTask) -> anyhow::Result<Option<TaskSpeed>> {
        task_speed(task, &self.run_worker(&task.cli_name())?).map(Some)
    }
}

/// The name of the task that measures the machine instead of an engine.
const LIMITS_TASK: &str = "limits";

impl CandleRunner<'_> {
    /// Measures what this machine allows, in a process with the threads of the engine.
    pub(super) fn measure_limits(&self) -> anyhow::Result<MachineSpeed> {
        let ended = self.run_worker(LIMITS_TASK)?;
        serde_json::from_str(&ended.stdout).context("read the machine's limits")
    }

    /// Runs a task in a process of its own, with the threads of the engine.
    fn run_worker(&self, task: &str) -> anyhow::Result<task_process::EndedTask> {
        let BenchModel { directory, text, .. } = self.model;
        let mut command = Command::new(&self.program);
        command.args(["worker", "bench", "--task", task]);
        command.args(["--model", &path_text(directory), "--text", &path_text(text)]);
        command.env("RAYON_NUM_THREADS", self.threads.to_string());
        task_process::run_task(&mut command)
    }
}

pub(crate) fn run_engine_task(model: &Path, text: &Path, task: &str) -> anyhow::Result<()> {
    if task == LIMITS_TASK {
        let engine::MachineLimits { read_bytes_per_s, multiply_adds_per_s } =
            engine::MachineLimits::measure().context("measure the memory")?;
        return output::print_json(&MachineSpeed { read_bytes_per_s, multiply_adds_per_s });
    }
    let Some(task) = EngineTask::parse(task) else { bail!("--task {task}: no such task") };
    let tokens_per_s = match task {
        EngineTask::Prefill => measure_generate(model, MatrixDtype::Bf16, 1, PREFILL, 1)?.0,
        EngineTask::Decode(sequences) => {
            measure_generate(model, MatrixDtype::Bf16, sequences, PROMPT, NEW + 1)?.1
        }
        EngineTask::DecodeQuantized(sequences) => {
            measure_generate(model, MatrixDtype::Q8_0, sequences, PROMPT, NEW + 1)?.1
        }
        EngineTask::Perplexity => run_perplexity(model, text)?,
        EngineTask::Train => measure_training(model, false)?,
        EngineTask::TrainCheckpointed => measure_training(model, true)?,
    };
    output::print_json(&TaskOutput { tokens_per_s })
}

/// Returns the tokens per second of prefill and of decoding.
///
/// It admits `sequences` prompts of `prompt` tokens and samples `new` tokens each.
fn measure_generate(
    model: &Path,
    dtype: MatrixDtype,
    sequences: usize,
    prompt: usize,
    new: usize,
) -> anyhow::Result<(f64, f64)> {
    let (model, tokenizer) = engine::load_model(model, None, "cpu", dtype)?;
    let mut generator = BatchGenerator::new(model.into_packed()?, tokenizer, sequences);
    for first in 0..sequences {
        let tokens = (0..prompt).map(|n| ((first * prompt + n) % 256) as u32).collect();
        let sampling =
            SamplingParameters { temperature: 0.0, top_k: 0, top_p: 1.0, max_new_tokens: new };
        let seeds = vec![0];
        generator.admit_request(PromptRequest {
            tag: (),
            prompt: PromptInput::Tokens(tokens),
            seeds,
            sampling,
        })?;
    }
    let began = Instant::now();
    // The first step prefills all prompts and samples the first token of each.
    generator.generate_step()?;
    let prefill = (sequences * prompt) as f64 / began.elapsed().as_secs_f64();
    let (began, mut decoded) = (Instant::now(), 0);
    while !generator.is_idle() {
        for completion in generator.generate_step()? {
            // The first token belongs to the prefill.
            decoded += completion.tokens.len() - 1;
        }
    }
    let decode = decoded as f64 / began.elapsed().as_secs_f64();
    Ok((prefill, decode))
}

fn run_perplexity(model: &Path, text: &Path) -> anyhow::Result<f64> {
    let (model, tokenizer) = engine::load_model(model, None, "cpu", MatrixDtype::Bf16)?;
    let text = std::fs::read_to_string(text).context("read the text")?;
    let figures =
        engine::score_chunks(&model, &tokenizer, &text, CONTEXT, Some(CHUNKS), |_, _| {})?;
    Ok(figures.tokens as f64)
}

/// Returns the tokens per second of a LoRA training, without its first step.
fn measure_training(model: &Path, gradient_checkpointing: bool) -> anyhow::Result<f64> {
    let (model, tokenizer) = engine::load_model(model, None, "cpu", MatrixDtype::Bf16)?;
    // Each byte is one token; the end token completes the sequence.
    let half = |letter: char, length| std::iter::repeat_n(letter, length).collect::<String>();
    let example = CompletionExample::new(half('p', LENGTH / 2), half('c', LENGTH / 2 - 1));
    let modules = LayerModule::ALL.into_iter().collect();
    let method = TrainMethod::Lora(LoraSpec { rank: 16, alpha: 32.0, modules, rslora: false });
    let spec = TrainSpec {
        learning_rate: 1e-4,
        batch_size: BATCH,
        micro_batch_tokens: BATCH * LENGTH,
        gradient_checkpointing,
        max_steps: Some(STEPS + 1),
        max_tokens: LENGTH,
        ..TrainSpec::default()
    };
    let mut trainer = ModelTrainer::new(model, &tokenizer, method, &vec![example; BATCH], spec)?;
    trainer.run_step()?;
    let (began, mut tokens) = (Instant::now(), 0);
    while let Some(report) = trainer.run_step()? {
        tokens += report.tokens;
    }
    Ok(tokens as f64 / began.elapsed().as_secs_f64())
}
