//! Measures `flotilla-bench engine`: the embedded engine, llama.cpp and PyTorch on one machine in
//! one run.
//!
//! The model has random weights in the shape of Qwen2.5-0.5B. Each task runs in a process of its
//! own, so that its peak memory is its own. Engines alternate at each task and the fastest of an
//! engine's rounds counts, because the machine may be busy.

mod candle;
mod generate_order;
mod goals;
mod llama;
mod llama_build;
mod markdown;
mod pytorch;
mod scratch_model;
mod task_process;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context;
use cli::output;
use generator::GeneratorEngineChoice;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::args::BenchArgs;

pub(super) use candle::run_engine_task;

/// Tokens of the single sequence whose prefill is measured.
const PREFILL: usize = 512;

/// Tokens of each prompt before decoding is measured.
const PROMPT: usize = 64;
/// Tokens that each sequence decodes.
const NEW: usize = 32;

/// Tokens of a window of the perplexity. Its process is measured as a whole, because evaluations
/// run that way.
const CONTEXT: usize = 512;
/// Windows of the perplexity.
const CHUNKS: usize = 8;

/// Sequences of an optimizer step of the LoRA training (rank 16, all modules).
const BATCH: usize = 2;
/// Tokens of each training sequence.
const LENGTH: usize = 256;
/// Measured optimizer steps, after one that warms up.
const STEPS: usize = 3;

/// Rounds of each engine at each task.
const ROUNDS: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EngineTask {
    Prefill,
    Decode(usize),
    /// With weights in 8 bits, Q8_0.
    DecodeQuantized(usize),
    Perplexity,
    Train,
    TrainCheckpointed,
}

/// All tasks, in the order of the report.
const TASKS: [EngineTask; 10] = [
    EngineTask::Prefill,
    EngineTask::Decode(1),
    EngineTask::Decode(8),
    EngineTask::Decode(32),
    EngineTask::DecodeQuantized(1),
    EngineTask::DecodeQuantized(8),
    EngineTask::DecodeQuantized(32),
    EngineTask::Perplexity,
    EngineTask::Train,
    EngineTask::TrainCheckpointed,
];

impl EngineTask {
    fn cli_name(self) -> String {
        match self {
            Self::Prefill => "prefill".into(),
            Self::Decode(sequences) => format!("decode-{sequences}"),
            Self::DecodeQuantized(sequences) => format!("decode-q8_0-{sequences}"),
            Self::Perplexity => "perplexity".into(),
            Self::Train => "train".into(),
            Self::TrainCheckpointed => "train-recompute".into(),
        }
    }

    /// Returns the task with a name, or `None`.
    fn parse(name: &str) -> Option<Self> {
        TASKS.into_iter().find(|task| task.cli_name() == name)
    }

    fn report_title(self) -> String {
        match self {
            Self::Prefill => format!("prefill, {PREFILL} tokens"),
            Self::Decode(sequences) => format!("decode, {sequences} at once"),
            Self::DecodeQuantized(sequences) => format!("decode in q8_0, {sequences} at once"),
            Self::Perplexity => format!("perplexity, {CHUNKS} × {CONTEXT}, load included"),
            Self::Train => format!("LoRA training, {BATCH} × {LENGTH}"),
            Self::TrainCheckpointed => "with gradient checkpointing".into(),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct TaskOutput {
    tokens_per_s: f64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct TaskSpeed {
    tokens_per_s: f64,
    peak_rss_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct EngineSpeeds {
    name: String,
    /// False for a build that does not use what this machine can do. A ratio to it is no result.
    strong_peer: bool,
    speeds: BTreeMap<String, TaskSpeed>,
}

/// The speed of a conversion to bf16 GGUF, in megabytes of the Hugging Face weights per second.
#[derive(Debug, Serialize, Deserialize)]
struct ConversionSpeed {
    name: String,
    megabytes_per_s: f64,
    peak_rss_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct OrderSpeed {
    engine: String,
    tokens_per_s: f64,
    /// Seconds from the request for another adapter until the worker can draw with it.
    swap_s: f64,
    /// The tokens per second that the engine's own benchmark allows, if it has one.
    limit_per_s: Option<f64>,
}

/// The limits of the machine, with the threads of the engines.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct MachineSpeed {
    read_bytes_per_s: f64,
    /// Of operands in registers.
    multiply_adds_per_s: f64,
}

/// The parameters of the model, by how often a token uses them.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct ModelSize {
    /// Bytes of the weights that a decoded token reads.
    decoded_bytes: u64,
    /// Multiplications of a prefilled token, without attention and without the output layer, which
    /// only the last token needs.
    prefill_products: u64,
    /// Multiplications of a decoded token, without attention.
    decode_products: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct EnginesReport {
    machine: String,
    /// Absent in older reports.
    #[serde(default)]
    limits: Option<(MachineSpeed, ModelSize)>,
    threads: usize,
    load_before: Vec<f64>,
    load_after: Vec<f64>,
    engines: Vec<EngineSpeeds>,
    sampled: Vec<OrderSpeed>,
    conversions: Vec<ConversionSpeed>,
}

pub(super) async fn bench_engines(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let (as_json, args) = (args.json, args.clone());
    let report = tokio::task::spawn_blocking(move || measure_engines(&args, &TASKS)).await??;
    let figures = goals::engine_figures(&report);
    if as_json {
        let figures: Vec<_> = figures.iter().map(super::BenchFigure::to_json).collect();
        let mut document = super::build_document(&report.load_before, &figures);
        document["engines"] = json!(report);
        output::print_json(&document)?;
        return Ok(ExitCode::SUCCESS);
    }
    super::print_figures(&figures, &report.load_before);
    output::print_text(&format!("\n{}", format_report(&report)));
    Ok(ExitCode::SUCCESS)
}

pub(super) fn format_report(report: &EnginesReport) -> String {
    markdown::write_markdown(report)
}

pub(super) async fn measure_eval(args: &BenchArgs) -> anyhow::Result<Vec<super::BenchFigure>> {
    let args = args.clone();
    let measure = move || measure_engines(&args, &[EngineTask::Perplexity]);
    Ok(goals::engine_figures(&tokio::task::spawn_blocking(measure).await??))
}

/// The embedded engine must succeed; other engines are skipped with a message if they are missing
/// or fail.
fn measure_engines(args: &BenchArgs, tasks: &[EngineTask]) -> anyhow::Result<EnginesReport> {
    let load_before = super::read_load_average();
    let scratch = tempfile::tempdir().context("make a directory for the model")?;
    let model = scratch_model::write_model(scratch.path())?;
    let threads = args.threads.map_or(2, |threads| threads as usize);
    let [gguf, quantized] = ["model.gguf", "q8_0.gguf"].map(|name| scratch.path().join(name));
    let mut conversions = vec![
        llama::convert_model(&model, "bf16", &gguf)?,
        llama::convert_model(&model, "q8_0", &quantized)?,
    ];
    let files = llama::ModelFiles { bf16: gguf.clone(), quantized: quantized.clone() };
    let llama =
        llama::LlamaRunner::find_installation(args.llama_cpp.as_deref(), &model, &files, threads);
    let llama = skip_on_error("llama.cpp", llama).flatten();
    let embedded = candle::CandleRunner::new(&model, threads)?;
    let limits = (tasks == TASKS).then(|| embedded.measure_limits()).transpose()?;
    let mut runners: Vec<Box<dyn EngineRunner + '_>> = vec![Box::new(embedded)];
    runners.extend(llama.iter().map(|llama| Box::new(llama) as Box<dyn EngineRunner + '_>));
    if let Some(python) = &args.python {
        if let Some(torch) =
            skip_on_error("PyTorch", pytorch::PyTorchRunner::new(python, &model, threads))
        {
            runners.push(Box::new(torch));
        }
        if let Some(converter) = &args.converter {
            let converted = pytorch::convert_with_python(python, converter, &model, scratch.path());
            conversions.extend(skip_on_error("llama.cpp's converter", converted));
        }
    }
    scratch_model::evict_files(&[&model.weights, &gguf, &quantized])?;
    let engines = run_in_turns(runners, tasks)?;
    let sampled = if tasks == TASKS {
        measure_orders(llama.as_ref(), &engines, &model, &gguf, threads)
    } else {
        Vec::new()
    };
    Ok(EnginesReport {
        machine: describe_machine(),
        limits: limits.map(|limits| (limits, model.size)),
        threads,
        load_before,
        load_after: super::read_load_average(),
        engines,
        sampled,
        conversions,
    })
}

fn measure_orders(
    llama: Option<&llama::LlamaRunner<'_>>,
    engines: &[EngineSpeeds],
    model: &BenchModel,
    gguf: &Path,
    threads: usize,
) -> Vec<OrderSpeed> {
    let choices = [
        (GeneratorEngineChoice::Candle, "candle", model.directory.as_path()),
        (GeneratorEngineChoice::LlamaCpp, "llama.cpp", gguf),
    ];
    let sampled = choices.iter().filter_map(|(choice, name, base)| {
        let engine = engines.iter().find(|engine| engine.name.starts_with(name))?;
        let programs = llama.map(llama::LlamaRunner::program_directory);
        let made =
            generate_order::measure_order(engine, choice, programs.as_deref(), base, threads);
        skip_on_error(&format!("{name}'s generate order"), made)
    });
    let mut sampled: Vec<OrderSpeed> = sampled.collect();
    let of_llama = sampled.iter_mut().find(|made| made.engine.starts_with("llama.cpp"));
    if let (Some(llama), Some(made)) = (llama, of_llama) {
        made.limit_per_s = skip_on_error("llama.cpp's own limit", llama.measure_order_limit());
    }
    sampled
}

/// Reports an error of another engine and continues without it, so that minutes of measurements are
/// not lost.
fn skip_on_error<T>(peer: &str, measured: anyhow::Result<T>) -> Option<T> {
    measured
        .inspect_err(|error| output::print_message(&format!("engines: without {peer}: {error:#}")))
        .ok()
}

struct BenchModel {
    directory: PathBuf,
    text: PathBuf,
    weights: PathBuf,
    weight_bytes: u64,
    size: ModelSize,
}

impl<T: EngineRunner> EngineRunner for &T {
    fn engine_name(&self) -> &str {
        (**self).engine_name()
    }

    fn is_strong_peer(&self) -> bool {
        (**self).is_strong_peer()
    }

    fn measure_speed(&self, task: EngineTask) -> anyhow::Result<Option<TaskSpeed>> {
        (**self).measure_speed(task)
    }
}

trait EngineRunner {
    fn engine_name(&self) -> &str;

    /// Returns false for a build that does not use what this machine can do.
    fn is_strong_peer(&self) -> bool {
        true
    }

    /// Runs a task and returns its speed, or `None` if the engine does not support the task.
    fn measure_speed(&self, task: EngineTask) -> anyhow::Result<Option<TaskSpeed>>;
}

/// The first runner is the embedded engine: its error ends the measurement. Another engine that
/// fails is dropped from the results.
fn run_in_turns(
    runners: Vec<Box<dyn EngineRunner + '_>>,
    tasks: &[EngineTask],
) -> anyhow::Result<Vec<EngineSpeeds>> {
    let with_engine = runners.into_iter().map(|runner| {
        let (name, strong_peer) = (runner.engine_name().to_owned(), runner.is_strong_peer());
        (runner, EngineSpeeds { name, strong_peer, speeds: BTreeMap::new() })
    });
    let mut all: Vec<_> = with_engine.collect();
    let turns = (1..=ROUNDS).flat_map(|round| tasks.iter().map(move |task| (round, *task)));
    for (round, task) in turns {
        let mut index = 0;
        while let Some((runner, engine)) = all.get_mut(index) {
            let taken = engine.record_round(&**runner, task, round);
            if index == 0 {
                taken?;
            } else if skip_on_error(&engine.name, taken).is_none() {
                all.remove(index);
                continue;
            }
            index += 1;
        }
    }
    Ok(all.into_iter().map(|(_, engine)| engine).collect())
}

impl EngineSpeeds {
    fn record_round(
        &mut self,
        runner: &dyn EngineRunner,
        task: EngineTask,
        round: usize,
    ) -> anyhow::Result<()> {
        let (name, title) = (&self.name, task.report_title());
        let speed =
            runner.measure_speed(task).with_context(|| format!("measure {}", task.cli_name()))?;
        let Some(new) = speed else { return Ok(()) };
        // Report each round: a later one may be interrupted before the report.
        output::print_message(&format!(
            "engines: {round}: {name}, {title}: {:.1} tokens/s",
            new.tokens_per_s
        ));
        let best = self.speeds.entry(task.cli_name()).or_insert(new);
        best.tokens_per_s = best.tokens_per_s.max(new.tokens_per_s);
        best.peak_rss_bytes = best.peak_rss_bytes.max(new.peak_rss_bytes);
        Ok(())
    }
}

/// The perplexity counts the whole wall time of the process; other tasks report their speed
/// themselves.
fn task_speed(task: EngineTask, ended: &task_process::EndedTask) -> anyhow::Result<TaskSpeed> {
    let tokens_per_s = match task {
        EngineTask::Perplexity => (CHUNKS * CONTEXT) as f64 / ended.wall.as_secs_f64(),
        _ => {
            let line = ended.stdout.lines().last().unwrap_or_default();
            serde_json::from_str::<TaskOutput>(line)
                .with_context(|| format!("read what it said: {line:?}"))?
                .tokens_per_s
        }
    };
    Ok(TaskSpeed { tokens_per_s, peak_rss_bytes: ended.peak_rss_bytes })
}

pub(super) fn describe_machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let name = name.map_or("an unnamed processor", |(_, name)| name.trim()).to_owned();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    format!("{name}, {cores} cores seen")
}

fn path_text(path: &Path) -> String {
    path.display().to_string()
}
