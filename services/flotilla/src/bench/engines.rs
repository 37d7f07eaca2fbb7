//! `flotilla bench engine`: what can run a model, beside each other on one machine in one run,
//! on random weights in the shape of Qwen2.5-0.5B. Each task is a process of its own, so that its
//! peak memory is its own. They take turns at each task, and the best of an engine's turns counts:
//! the machine may be busy.

mod candle;
mod child;
mod document;
mod figures;
mod llama;
mod model;
mod raft;
mod torch;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::Context;
use generator::Choice;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{cli::BenchArgs, output};

pub(crate) use candle::work;

/// Tokens of the one sequence whose prefill is measured.
const PREFILL: usize = 512;

/// Tokens of each prompt that is decoded from, and decoded tokens.
const PROMPT: usize = 64;
const NEW: usize = 32;

/// Of the perplexity, whose process is measured as a whole: this is how evals run.
const CONTEXT: usize = 512;
const CHUNKS: usize = 8;

/// Of a LoRA training: r 16 on all modules.
const BATCH: usize = 2;
const LENGTH: usize = 256;
const STEPS: usize = 3;

/// Turns of each engine at each task.
const ROUNDS: usize = 3;

/// What is measured, in the order of the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Task {
    Prefill,
    Decode(usize),
    Perplexity,
    Train,
    /// With gradient checkpointing.
    TrainAnew,
}

const TASKS: [Task; 7] = [
    Task::Prefill,
    Task::Decode(1),
    Task::Decode(8),
    Task::Decode(32),
    Task::Perplexity,
    Task::Train,
    Task::TrainAnew,
];

impl Task {
    /// As processes are told.
    fn name(self) -> String {
        match self {
            Self::Prefill => "prefill".into(),
            Self::Decode(sequences) => format!("decode-{sequences}"),
            Self::Perplexity => "perplexity".into(),
            Self::Train => "train".into(),
            Self::TrainAnew => "train-anew".into(),
        }
    }

    fn parse(name: &str) -> Option<Self> {
        TASKS.into_iter().find(|task| task.name() == name)
    }

    fn title(self) -> String {
        match self {
            Self::Prefill => format!("prefill, {PREFILL} tokens"),
            Self::Decode(sequences) => format!("decode, {sequences} at once"),
            Self::Perplexity => format!("perplexity, {CHUNKS} × {CONTEXT}, load included"),
            Self::Train => format!("LoRA training, {BATCH} × {LENGTH}"),
            Self::TrainAnew => "the same with gradient checkpointing".into(),
        }
    }
}

/// What a task's process says.
#[derive(Debug, Serialize, Deserialize)]
struct Said {
    tokens_per_s: f64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Speed {
    tokens_per_s: f64,
    peak_rss_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Engine {
    /// With versions.
    name: String,
    speeds: BTreeMap<String, Speed>,
}

/// Bytes of the HF directory's weights a second, to bf16.
#[derive(Debug, Serialize, Deserialize)]
struct Conversion {
    name: String,
    megabytes_per_s: f64,
    peak_rss_bytes: u64,
}

/// A generate order's speed, worker's start included.
#[derive(Debug, Serialize, Deserialize)]
struct Sampled {
    engine: String,
    tokens_per_s: f64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Report {
    machine: String,
    threads: usize,
    load_before: Vec<f64>,
    load_after: Vec<f64>,
    engines: Vec<Engine>,
    sampled: Vec<Sampled>,
    conversions: Vec<Conversion>,
}

pub(super) async fn bench(args: &BenchArgs, as_json: bool) -> anyhow::Result<()> {
    let args = args.clone();
    let report = tokio::task::spawn_blocking(move || measure(&args, &TASKS)).await??;
    let figures = figures::of(&report);
    if as_json {
        let figures: Vec<_> = figures.iter().map(super::Figure::json).collect();
        let mut document = super::document(&report.load_before, &figures);
        document["engines"] = json!(report);
        return output::print_json(&document);
    }
    super::print(&figures, &report.load_before);
    output::print(&format!("\n{}", text(&report)));
    Ok(())
}

/// As Markdown.
pub(super) fn text(report: &Report) -> String {
    document::write(report)
}

/// `bench eval`: as evaluators do it, a process of its own each time.
pub(super) async fn eval(args: &BenchArgs) -> anyhow::Result<Vec<super::Figure>> {
    let args = args.clone();
    let measure = move || measure(&args, &[Task::Perplexity]);
    Ok(figures::of(&tokio::task::spawn_blocking(measure).await??))
}

fn measure(args: &BenchArgs, tasks: &[Task]) -> anyhow::Result<Report> {
    let load_before = super::load();
    let scratch = tempfile::tempdir().context("make a directory for the model")?;
    let model = model::write(scratch.path())?;
    let threads = args.threads.map_or(2, |threads| threads as usize);
    let mut runners: Vec<Box<dyn Runner + '_>> =
        vec![Box::new(candle::Worker::new(&model, threads)?)];
    let gguf = scratch.path().join("model.gguf");
    let mut conversions = vec![llama::convert(&model, &gguf)?];
    let llama = llama::Programs::find(args.llama_cpp.as_deref(), &model, &gguf, threads);
    if let Some(llama) = or_without("llama.cpp", llama).flatten() {
        runners.push(Box::new(llama));
    }
    if let Some(python) = &args.python {
        if let Some(torch) = or_without("PyTorch", torch::Script::new(python, &model, threads)) {
            runners.push(Box::new(torch));
        }
        if let Some(converter) = &args.converter {
            let converted = torch::convert(python, converter, &model, scratch.path());
            conversions.extend(or_without("llama.cpp's converter", converted));
        }
    }
    model::evict(&[&model.weights, &gguf])?;
    let engines = in_turns(runners, tasks)?;
    let sampled =
        if tasks == TASKS { sample(args, &engines, &model, &gguf, threads) } else { Vec::new() };
    Ok(Report {
        machine: machine(),
        threads,
        load_before,
        load_after: super::load(),
        engines,
        sampled,
        conversions,
    })
}

/// By the embedded engine and, where it is, llama.cpp.
fn sample(
    args: &BenchArgs,
    engines: &[Engine],
    model: &Model,
    gguf: &Path,
    threads: usize,
) -> Vec<Sampled> {
    let choices = [
        (Choice::Candle, "candle", model.directory.as_path()),
        (Choice::LlamaCpp, "llama.cpp", gguf),
    ];
    let sampled = choices.iter().filter_map(|(choice, name, base)| {
        let engine = engines.iter().find(|engine| engine.name.starts_with(name))?;
        let made = raft::measure(engine, choice, args.llama_cpp.as_deref(), base, threads);
        or_without(&format!("{name}'s generate order"), made)
    });
    sampled.collect()
}

/// What goes wrong with a peer must not lose what took minutes to measure.
fn or_without<T>(peer: &str, measured: anyhow::Result<T>) -> Option<T> {
    measured.inspect_err(|error| output::say(&format!("engines: without {peer}: {error:#}"))).ok()
}

/// A model and a text for it, in a directory that is removed after.
struct Model {
    directory: PathBuf,
    text: PathBuf,
    weights: PathBuf,
    weight_bytes: u64,
}

/// What can do tasks.
trait Runner {
    /// With versions.
    fn name(&self) -> &str;

    /// `None` when it is not made for that.
    fn speed(&self, task: Task) -> anyhow::Result<Option<Speed>>;
}

/// The first is ours, and must not fail.
fn in_turns(runners: Vec<Box<dyn Runner + '_>>, tasks: &[Task]) -> anyhow::Result<Vec<Engine>> {
    let with_engine = runners.into_iter().map(|runner| {
        let name = runner.name().to_owned();
        (runner, Engine { name, speeds: BTreeMap::new() })
    });
    let mut all: Vec<_> = with_engine.collect();
    let turns = (1..=ROUNDS).flat_map(|round| tasks.iter().map(move |task| (round, *task)));
    for (round, task) in turns {
        let mut index = 0;
        while let Some((runner, engine)) = all.get_mut(index) {
            let taken = engine.take_turn(&**runner, task, round);
            if index == 0 {
                taken?;
            } else if or_without(&engine.name, taken).is_none() {
                all.remove(index);
                continue;
            }
            index += 1;
        }
    }
    Ok(all.into_iter().map(|(_, engine)| engine).collect())
}

impl Engine {
    /// Keeps the fastest turn's speed, and the most memory of any.
    fn take_turn(&mut self, runner: &dyn Runner, task: Task, round: usize) -> anyhow::Result<()> {
        let (name, title) = (&self.name, task.title());
        let speed = runner.speed(task).with_context(|| format!("measure {}", task.name()))?;
        let Some(new) = speed else { return Ok(()) };
        // What comes after may be stopped before the report.
        output::say(&format!(
            "engines: {round}: {name}, {title}: {:.1} tokens/s",
            new.tokens_per_s
        ));
        let best = self.speeds.entry(task.name()).or_insert(new);
        best.tokens_per_s = best.tokens_per_s.max(new.tokens_per_s);
        best.peak_rss_bytes = best.peak_rss_bytes.max(new.peak_rss_bytes);
        Ok(())
    }
}

/// A task's process has ended: its own figure, but for the perplexity, which counts all its time.
fn speed(task: Task, ended: &child::Ended) -> anyhow::Result<Speed> {
    let tokens_per_s = match task {
        Task::Perplexity => (CHUNKS * CONTEXT) as f64 / ended.wall.as_secs_f64(),
        _ => {
            let line = ended.stdout.lines().last().unwrap_or_default();
            serde_json::from_str::<Said>(line)
                .with_context(|| format!("read what it said: {line:?}"))?
                .tokens_per_s
        }
    };
    Ok(Speed { tokens_per_s, peak_rss_bytes: ended.peak_rss_bytes })
}

pub(super) fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let name = name.map_or("an unnamed processor", |(_, name)| name.trim()).to_owned();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    format!("{name}, {cores} cores seen")
}

fn path_text(path: &Path) -> String {
    path.display().to_string()
}
