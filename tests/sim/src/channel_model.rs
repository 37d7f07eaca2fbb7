//! Models of what channels depend on outside of the log: comparisons, ratings and feedback.

use cycle::{Run, best_checkpoint, compared_cycle, move_to_checkpoint};
use wire::{RunId, derive_seed, v1};

use v1::channel_move::Evidence;

/// The channel of each simulation.
pub(crate) const CHANNEL: &str = "stable";

/// Requests with new feedback after which a run learns from it.
pub(crate) const AT_LEAST: u32 = 12;

/// The time between two requests with feedback, and the number of them.
const FEEDBACK_EVERY_MS: u64 = 1_000;
const FEEDBACK_MAX: u64 = 50;

pub(crate) const ALPHA: f64 = 0.05;

pub(crate) fn channel() -> RunId {
    RunId::new(CHANNEL).expect("a legal name")
}

/// Returns the promotion of a run that learns from no feedback.
pub(crate) fn promotion() -> v1::spec::Promotion {
    v1::spec::Promotion { channel: CHANNEL.into(), alpha: ALPHA, ..Default::default() }
}

/// Returns the positions of the feedback that has been given.
pub(crate) fn feedback_positions(now_ms: u64) -> Vec<u64> {
    (1..=(now_ms / FEEDBACK_EVERY_MS).min(FEEDBACK_MAX)).collect()
}

/// Better models have a higher score, which users and held-out prompts agree on.
fn score(named: &v1::ChannelMove) -> u64 {
    let manifest = |tree: &Option<v1::Tree>| tree.as_ref().map_or("", |it| &it.manifest).to_owned();
    derive_seed(3, &["score", &manifest(&named.base), &manifest(&named.adapter)])
}

pub(crate) fn is_better(next: &v1::ChannelMove, before: &v1::ChannelMove) -> bool {
    score(next) > score(before)
}

/// Returns the best checkpoint of a run, and the evidence that it is better than the model that a
/// channel names.
pub(crate) fn compare_best(
    before: &v1::ChannelMove,
    run: &Run,
) -> Option<(v1::ChannelMove, Evidence)> {
    let model = best_checkpoint(run).map(move_to_checkpoint)?;
    let (of_run, cycle) = compared_cycle(before, &model.run, &run.spec)?;
    is_better(&model, before).then(|| (model, find_evidence(of_run, cycle, false)))
}

/// Returns the evidence that one model is better than the other, for which `run` and `cycle` stand.
pub(crate) fn find_evidence(run: String, cycle: u32, live: bool) -> Evidence {
    let interval = vec![0.05, 0.35];
    Evidence { run, cycle, pairs: 40, p: 0.01, difference: 0.2, interval, live }
}
