//! Memory and disk that a training takes.

use super::{Finding, Plan};
use crate::{
    Profile,
    doctor::{Severity, budget, gib},
    estimate::{Method, Shape, Training, Verdict},
    snapshot::Snapshot,
};

const GB: u64 = 1_000_000_000;

pub(super) fn check(box_: &Snapshot, profile: &Profile, plan: &Plan) -> Vec<Finding> {
    let Some((shape, training)) = plan.memory else { return Vec::new() };
    let mut findings = Vec::new();
    findings.extend(peak(box_, profile, &shape, &training));
    findings.extend(host(box_, &shape, &training));
    let free = plan.disk_free.or(box_.disk_free);
    findings.extend(free.and_then(|free| disk(free, &shape, &training)));
    findings
}

fn peak(box_: &Snapshot, profile: &Profile, shape: &Shape, training: &Training) -> Option<Finding> {
    let estimate = shape.training(training);
    let budget = budget(box_)?;
    let severity = match estimate.verdict(budget) {
        Verdict::Fits => return None,
        Verdict::Tight => Severity::Warn,
        Verdict::DoesNotFit => Severity::Fail,
    };
    let can_halve = profile.precision.can_halve();
    let remedy = match shape.shrink(training, budget, can_halve) {
        Some((changes, smaller)) => {
            format!("{}: {}", changes.join(", "), gib(smaller.peak_bytes))
        }
        None => "train a smaller model here: no batch of this one fits".into(),
    };
    Some(Finding {
        id: "C-62",
        severity,
        seen: format!("training peaks at {} of {}", gib(estimate.peak_bytes), gib(budget)),
        why: "it runs out of memory in the middle of a step, perhaps the longest of many",
        remedy,
        source: "the estimator's formulas, ± 10 %",
    })
}

/// Files of weights are cut at this size, and pass through the host's memory.
const SHARD: u64 = 5 * GB;

/// Of a Python that has torch and transformers loaded.
const PYTHON: u64 = 6 * GB;

/// Where the memory is one, the budget has left the host its share.
fn host(box_: &Snapshot, shape: &Shape, training: &Training) -> Option<Finding> {
    let weights = shape.training(training).parts.weights;
    let needed = weights.min(SHARD) + PYTHON;
    let available = box_.memory.available.min(box_.memory.limit.unwrap_or(u64::MAX));
    let short = available > 0 && available < needed;
    (short && !box_.gpus.is_empty() && !box_.is_unified()).then(|| Finding {
        id: "C-61",
        severity: Severity::Warn,
        seen: format!("loading takes {} of the host, which has {}", gib(needed), gib(available)),
        why: "weights pass through the host's memory on their way to the card",
        remedy: "end other programs; load in the dtype of the files, to the GPU directly".into(),
        source: "an R9700's post-mortem: 7.6 billion weights in f32 are 30 GB",
    })
}

/// An adapter's weights and both moments, in f32.
const SAVED_BYTES: u64 = 12;

/// Checkpoints that are kept.
const KEPT: u64 = 3;

fn disk(free: u64, shape: &Shape, training: &Training) -> Option<Finding> {
    let estimate = shape.training(training);
    let base = match training.method {
        // As GGUF, for evals.
        Method::Lora { .. } => estimate.parameters.saturating_mul(2),
        Method::Full => 0,
    };
    let checkpoints = estimate.trainable.saturating_mul(SAVED_BYTES * KEPT);
    let needed = base.saturating_add(checkpoints).saturating_mul(6) / 5;
    (free < needed).then(|| Finding {
        id: "C-35",
        severity: Severity::Fail,
        seen: format!("{} free of the {} that it needs", gib(free), gib(needed)),
        why: "a base as GGUF, three checkpoints with the optimizer's moments, and a fifth more",
        remedy: "free some, or write to another disk".into(),
        source: "two bytes a parameter, twelve a trained one",
    })
}
