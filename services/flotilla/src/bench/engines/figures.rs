//! The embedded engine's times beside what its peers' allow.

use super::{Engine, Report, Task, raft};
use crate::bench::Figure;

/// Of a peer's speed on the same machine in the same run.
struct Goal {
    name: &'static str,
    task: Task,
    peer: &'static str,
    at_least: f64,
}

const fn goal(name: &'static str, task: Task, peer: &'static str, at_least: f64) -> Goal {
    Goal { name, task, peer, at_least }
}

const LLAMA: &str = "llama.cpp";
const TORCH: &str = "PyTorch";

const SPEEDS: [Goal; 7] = [
    goal("engine: prefill", Task::Prefill, LLAMA, 1.0),
    goal("engine: decode, 1 sequence", Task::Decode(1), LLAMA, 1.0),
    goal("engine: decode, 8 sequences", Task::Decode(8), LLAMA, 1.5),
    goal("engine: decode, 32 sequences", Task::Decode(32), LLAMA, 1.6),
    goal("engine: perplexity", Task::Perplexity, LLAMA, 1.0),
    goal("engine: LoRA training", Task::Train, TORCH, 1.25),
    goal("engine: LoRA, checkpointing", Task::TrainAnew, TORCH, 1.25),
];

/// Of a peer's peak memory.
const MEMORY: [(&str, Task); 2] = [
    ("engine: memory of LoRA training", Task::Train),
    ("engine: memory, checkpointing", Task::TrainAnew),
];
const MEMORY_SHARE: f64 = 0.6;

const ORDER: &str = "engine: generate order, k = 8";
const ORDER_AT_LEAST: f64 = 1.3;

pub(super) fn of(report: &Report) -> Vec<Figure> {
    let Some(ours) = report.engines.first() else { return Vec::new() };
    let peer = |name: &str| report.engines.iter().find(|engine| engine.name.starts_with(name));
    let mut figures = Vec::new();
    for Goal { name, task, peer: of, at_least } in &SPEEDS {
        let speed = |engine: &Engine| Some(engine.speeds.get(&task.name())?.tokens_per_s);
        let theirs = peer(of).and_then(speed);
        figures.extend(speed(ours).map(|ours| time(name, ours, of, theirs, *at_least)));
    }
    let sampled = |name: &str| {
        let one = report.sampled.iter().find(|sampled| sampled.engine.starts_with(name));
        one.map(|sampled| sampled.tokens_per_s)
    };
    figures.extend(sampled("candle").map(|ours| {
        let figure = time(ORDER, ours, LLAMA, sampled(LLAMA), ORDER_AT_LEAST);
        Figure { how: format!("{}; {}", raft::title(), figure.how), ..figure }
    }));
    for (name, task) in MEMORY {
        let peak =
            |engine: &Engine| Some(engine.speeds.get(&task.name())?.peak_rss_bytes as f64 / 1e9);
        let theirs = peer(TORCH).and_then(peak);
        figures.extend(peak(ours).map(|measured| Figure {
            name,
            measured,
            unit: "GB",
            limit: theirs.map(|theirs| MEMORY_SHARE * theirs),
            how: theirs.map_or("no PyTorch to compare with".into(), |theirs| {
                format!("{TORCH} {theirs:.2} GB, of which {:.2}", measured / theirs)
            }),
        }));
    }
    figures
}

/// Milliseconds a token, and how many the peer's allow.
fn time(name: &'static str, ours: f64, peer: &str, theirs: Option<f64>, at_least: f64) -> Figure {
    Figure {
        name,
        measured: 1e3 / ours,
        unit: "ms/token",
        limit: theirs.map(|theirs| 1e3 / theirs / at_least),
        how: theirs.map_or(format!("{ours:.1} tokens/s; no {peer} to compare with"), |theirs| {
            format!(
                "{ours:.1} tokens/s, {peer} {theirs:.1}: {:.2} times as fast, to be {at_least}",
                ours / theirs
            )
        }),
    }
}
