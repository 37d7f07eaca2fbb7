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
/// What a generate order is compared with.
const LLAMA_LIMIT: &str = "llama-batched-bench";
/// Prefix of PyTorch's name in the report.
const TORCH: &str = "PyTorch";

/// The required speeds, by task.
const SPEED_GOALS: [SpeedGoal; 10] = [
    speed_goal("engine: prefill", EngineTask::Prefill, LLAMA, 1.15),
    speed_goal("engine: decode, 1 sequence", EngineTask::Decode(1), LLAMA, 1.0),
    speed_goal("engine: decode, 8 sequences", EngineTask::Decode(8), LLAMA, 1.8),
    speed_goal("engine: decode, 32 sequences", EngineTask::Decode(32), LLAMA, 1.6),
    speed_goal("engine: decode in 8 bits, 1", EngineTask::DecodeQuantized(1), LLAMA, 1.0),
    speed_goal("engine: decode in 8 bits, 8", EngineTask::DecodeQuantized(8), LLAMA, 1.3),
    speed_goal("engine: decode in 8 bits, 32", EngineTask::DecodeQuantized(32), LLAMA, 1.3),
    speed_goal("engine: perplexity", EngineTask::Perplexity, LLAMA, 1.25),
    speed_goal("engine: LoRA training", EngineTask::Train, TORCH, 1.5),
    speed_goal("engine: LoRA, checkpointing", EngineTask::TrainCheckpointed, TORCH, 1.5),
];

/// The tasks whose peak memory is compared with PyTorch.
const MEMORY_GOALS: [(&str, EngineTask); 2] = [
    ("engine: memory of LoRA training", EngineTask::Train),
    ("engine: memory, checkpointing", EngineTask::TrainCheckpointed),
];
/// Accepted peak memory, relative to PyTorch.
const MEMORY_SHARE: f64 = 0.45;

/// Name of the figure of generate orders.
const ORDER_FIGURE: &str = "engine: generate order, k = 8";
/// Required speed of a generate order, relative to llama.cpp's own limit.
const ORDER_AT_LEAST: f64 = 2.0;

/// Name of the figure of `llama-server`, and its required share of llama.cpp's own limit.
const SERVER_FIGURE: (&str, f64) = ("engine: llama-server's order", 0.9);

/// Name of the figure of a changed adapter, and its limit in seconds.
const SWAP_FIGURE: (&str, f64) = ("engine: llama-server's next adapter", 0.5);

pub(super) fn engine_figures(report: &EnginesReport) -> Vec<BenchFigure> {
    let Some(ours) = report.engines.first() else { return Vec::new() };
    let peer = |name: &str| report.engines.iter().find(|engine| engine.name.starts_with(name));
    let mut figures = Vec::new();
    for SpeedGoal { name, task, peer: of, at_least } in &SPEED_GOALS {
        let speed = |engine: &EngineSpeeds| Some(engine.speeds.get(&task.cli_name())?.tokens_per_s);
        let theirs = peer(of).and_then(|peer| Some(PeerSpeed::of(peer, speed(peer)?)));
        figures.extend(speed(ours).map(|ours| time_figure(name, ours, of, theirs, *at_least)));
    }
    figures.extend(order_figures(report, peer(LLAMA)));
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

/// Compares the embedded engine's generate order and that of our `llama-server` with the limit of
/// llama.cpp's own benchmark.
fn order_figures(report: &EnginesReport, llama: Option<&EngineSpeeds>) -> Vec<BenchFigure> {
    let order = |name: &str| report.sampled.iter().find(|sampled| sampled.engine.starts_with(name));
    let through_server = order(LLAMA);
    let limit = through_server.and_then(|made| Some(PeerSpeed::of(llama?, made.limit_per_s?)));
    let (server_figure, server_share) = SERVER_FIGURE;
    let (swap_figure, swap_limit) = SWAP_FIGURE;
    let of_orders = [
        (ORDER_FIGURE, order("candle"), ORDER_AT_LEAST),
        (server_figure, through_server, server_share),
    ];
    let figures = of_orders.into_iter().filter_map(|(name, made, at_least)| {
        let figure = time_figure(name, made?.tokens_per_s, LLAMA_LIMIT, limit, at_least);
        let how = format!("{}; {}", generate_order::order_title(), figure.how);
        Some(BenchFigure { how, ..figure })
    });
    let swap = through_server.map(|made| BenchFigure {
        name: swap_figure,
        measured: made.swap_s,
        unit: "s",
        limit: Some(swap_limit),
        how: "until samples can be drawn, on the same base".into(),
    });
    figures.chain(swap).collect()
}

/// The speed of a peer, in tokens per second.
#[derive(Debug, Clone, Copy)]
struct PeerSpeed {
    tokens_per_s: f64,
    is_strong: bool,
}

impl PeerSpeed {
    fn of(peer: &EngineSpeeds, tokens_per_s: f64) -> Self {
        Self { tokens_per_s, is_strong: peer.strong_peer }
    }
}

/// Returns a figure in milliseconds per token, limited by the other engine's speed times
/// `at_least`. The speed of a build that leaves the machine's features unused is no limit.
fn time_figure(
    name: &'static str,
    ours: f64,
    peer: &str,
    theirs: Option<PeerSpeed>,
    at_least: f64,
) -> BenchFigure {
    let (limit, how) = match theirs {
        None => (None, format!("{ours:.1} tokens/s; no {peer} to compare with")),
        Some(PeerSpeed { tokens_per_s, is_strong: false }) => (
            None,
            format!(
                "{ours:.1} tokens/s; {peer} {tokens_per_s:.1} is that of a generic build, no \
                 result: run deploy/fetch-llama-cpp.sh --native"
            ),
        ),
        Some(PeerSpeed { tokens_per_s, is_strong: true }) => (
            Some(1e3 / tokens_per_s / at_least),
            format!(
                "{ours:.1} tokens/s, {peer} {tokens_per_s:.1}: {:.2} × (goal {at_least})",
                ours / tokens_per_s
            ),
        ),
    };
    BenchFigure { name, measured: 1e3 / ours, unit: "ms/token", limit, how }
}
