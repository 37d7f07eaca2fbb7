//! Compares the embedded engine with the goals relative to llama.cpp and PyTorch.

use super::{EngineSpeeds, EngineTask, EnginesReport, generate_order};
use crate::BenchFigure;

struct SpeedGoal {
    name: &'static str,
    task: EngineTask,
    peer: &'static str,
    at_least: f64,
}

const fn speed_goal(
    name: &'static str,
    task: EngineTask,
    peer: &'static str,
    at_least: f64,
) -> SpeedGoal {
    SpeedGoal { name, task, peer, at_least }
}

/// Prefix of llama.cpp's name in the report.
const LLAMA: &str = "llama.cpp";
/// Prefix of PyTorch's name in the report.
const TORCH: &str = "PyTorch";

/// The required speeds, by task.
const SPEED_GOALS: [SpeedGoal; 7] = [
    speed_goal("engine: prefill", EngineTask::Prefill, LLAMA, 1.0),
    speed_goal("engine: decode, 1 sequence", EngineTask::Decode(1), LLAMA, 1.0),
    speed_goal("engine: decode, 8 sequences", EngineTask::Decode(8), LLAMA, 1.5),
    speed_goal("engine: decode, 32 sequences", EngineTask::Decode(32), LLAMA, 1.6),
    speed_goal("engine: perplexity", EngineTask::Perplexity, LLAMA, 1.0),
    speed_goal("engine: LoRA training", EngineTask::Train, TORCH, 1.25),
    speed_goal("engine: LoRA, checkpointing", EngineTask::TrainCheckpointed, TORCH, 1.25),
];

/// The tasks whose peak memory is compared with PyTorch.
const MEMORY_GOALS: [(&str, EngineTask); 2] = [
    ("engine: memory of LoRA training", EngineTask::Train),
    ("engine: memory, checkpointing", EngineTask::TrainCheckpointed),
];
/// Accepted peak memory, relative to PyTorch.
const MEMORY_SHARE: f64 = 0.6;

/// Name of the figure of generate orders.
const ORDER_FIGURE: &str = "engine: generate order, k = 8";
/// Required speed of a generate order, relative to llama.cpp.
const ORDER_AT_LEAST: f64 = 1.3;

pub(super) fn engine_figures(report: &EnginesReport) -> Vec<BenchFigure> {
    let Some(ours) = report.engines.first() else { return Vec::new() };
    let peer = |name: &str| report.engines.iter().find(|engine| engine.name.starts_with(name));
    let mut figures = Vec::new();
    for SpeedGoal { name, task, peer: of, at_least } in &SPEED_GOALS {
        let speed = |engine: &EngineSpeeds| Some(engine.speeds.get(&task.cli_name())?.tokens_per_s);
        let theirs = peer(of).and_then(speed);
        figures.extend(speed(ours).map(|ours| time_figure(name, ours, of, theirs, *at_least)));
    }
    let sampled = |name: &str| {
        let one = report.sampled.iter().find(|sampled| sampled.engine.starts_with(name));
        one.map(|sampled| sampled.tokens_per_s)
    };
    figures.extend(sampled("candle").map(|ours| {
        let figure = time_figure(ORDER_FIGURE, ours, LLAMA, sampled(LLAMA), ORDER_AT_LEAST);
        BenchFigure { how: format!("{}; {}", generate_order::order_title(), figure.how), ..figure }
    }));
    for (name, task) in MEMORY_GOALS {
        let peak = |engine: &EngineSpeeds| {
            Some(engine.speeds.get(&task.cli_name())?.peak_rss_bytes as f64 / 1e9)
        };
        let theirs = peer(TORCH).and_then(peak);
        figures.extend(peak(ours).map(|measured| BenchFigure {
            name,
            measured,
            unit: "GB",
            limit: theirs.map(|theirs| MEMORY_SHARE * theirs),
            how: theirs.map_or("no PyTorch to compare with".into(), |theirs| {
                format!("{:.2} of {TORCH}'s {theirs:.2} GB", measured / theirs)
            }),
        }));
    }
    figures
}

/// Returns a figure in milliseconds per token, limited by the other engine's speed times
/// `at_least`.
fn time_figure(
    name: &'static str,
    ours: f64,
    peer: &str,
    theirs: Option<f64>,
    at_least: f64,
) -> BenchFigure {
    BenchFigure {
        name,
        measured: 1e3 / ours,
        unit: "ms/token",
        limit: theirs.map(|theirs| 1e3 / theirs / at_least),
        how: theirs.map_or(format!("{ours:.1} tokens/s; no {peer} to compare with"), |theirs| {
            format!(
                "{ours:.1} tokens/s, {peer} {theirs:.1}: {:.2} × (goal {at_least})",
                ours / theirs
            )
        }),
    }
}
