//! Checks of the memory and the disk space that a training needs.

use super::{DoctorFinding, TrainingPlan};
use crate::{
    Severity,
    estimate::{BudgetFit, ModelShape, PlannedTraining, TrainingMethod},
    format_gib, memory_budget,
};
use hardware::{HardwareProfile, host_snapshot::HostSnapshot};

const GB: u64 = 1_000_000_000;

pub(super) fn check_resources(
    box_: &HostSnapshot,
    profile: &HardwareProfile,
    plan: &TrainingPlan,
) -> Vec<DoctorFinding> {
    let Some((shape, training)) = plan.memory else { return Vec::new() };
    let mut findings = Vec::new();
    findings.extend(check_peak_memory(box_, profile, &shape, &training));
    findings.extend(check_host_memory(box_, &shape, &training));
    let free = plan.disk_free.or(box_.disk_free);
    findings.extend(free.and_then(|free| check_disk_space(free, &shape, &training)));
    findings
}

fn check_peak_memory(
    box_: &HostSnapshot,
    profile: &HardwareProfile,
    shape: &ModelShape,
    training: &PlannedTraining,
) -> Option<DoctorFinding> {
    let estimate = shape.estimate_training(training);
    let budget = memory_budget(box_)?;
    let severity = match estimate.budget_fit(budget) {
        BudgetFit::Fits => return None,
        BudgetFit::Tight => Severity::Warn,
        BudgetFit::DoesNotFit => Severity::Fail,
    };
    let can_halve = profile.precision.can_halve();
    let remedy = match shape.shrink_to_fit(training, budget, can_halve) {
        Some((changes, smaller)) => {
            format!("{}: {}", changes.join(", "), format_gib(smaller.peak_bytes))
        }
        None => "train a smaller model here: no batch of this one fits".into(),
    };
    Some(DoctorFinding {
        id: "C-62",
        severity,
        seen: format!(
            "training peaks at {} of {}",
            format_gib(estimate.peak_bytes),
            format_gib(budget)
        ),
        why: "it runs out of memory in the middle of a step, perhaps the longest of many",
        remedy,
        source: "the estimator's formulas, ± 10 %",
    })
}

/// Weights files pass through the host's memory one by one.
const SHARD_BYTES: u64 = 5 * GB;

/// A Python process with torch and transformers.
const PYTHON_BYTES: u64 = 6 * GB;

/// Unified memory is covered by the budget.
fn check_host_memory(
    box_: &HostSnapshot,
    shape: &ModelShape,
    training: &PlannedTraining,
) -> Option<DoctorFinding> {
    let weights = shape.estimate_training(training).parts.weights;
    let needed = weights.min(SHARD_BYTES) + PYTHON_BYTES;
    let available = box_.memory.available.min(box_.memory.limit.unwrap_or(u64::MAX));
    let short = available > 0 && available < needed;
    (short && !box_.gpus.is_empty() && !box_.is_unified()).then(|| DoctorFinding {
        id: "C-61",
        severity: Severity::Warn,
        seen: format!(
            "loading takes {} of the host, which has {}",
            format_gib(needed),
            format_gib(available)
        ),
        why: "weights pass through the host's memory on their way to the card",
        remedy: "end other programs; load in the dtype of the files, to the GPU directly".into(),
        source: "an R9700's post-mortem: 7.6 billion weights in f32 are 30 GB",
    })
}

/// An adapter parameter and both moments, in f32.
const SAVED_BYTES_PER_PARAMETER: u64 = 12;

const KEPT_CHECKPOINTS: u64 = 3;

/// Counts the base as GGUF and the checkpoints.
fn check_disk_space(
    free: u64,
    shape: &ModelShape,
    training: &PlannedTraining,
) -> Option<DoctorFinding> {
    let estimate = shape.estimate_training(training);
    let base = match training.method {
        // As GGUF, for evaluations.
        TrainingMethod::Lora { .. } => estimate.parameters.saturating_mul(2),
        TrainingMethod::Full => 0,
    };
    let checkpoints =
        estimate.trainable.saturating_mul(SAVED_BYTES_PER_PARAMETER * KEPT_CHECKPOINTS);
    let needed = base.saturating_add(checkpoints).saturating_mul(6) / 5;
    (free < needed).then(|| DoctorFinding {
        id: "C-35",
        severity: Severity::Fail,
        seen: format!("{} free of the {} that it needs", format_gib(free), format_gib(needed)),
        why: "a base as GGUF, three checkpoints with the optimizer's moments, and a fifth more",
        remedy: "free some, or write to another disk".into(),
        source: "two bytes a parameter, twelve a trained one",
    })
}
