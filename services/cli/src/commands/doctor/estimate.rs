//! `flotilla doctor estimate`: the memory of a training, before it is tried.

use std::path::Path;

use anyhow::Context;
use doctor::{
    estimate::{
        BudgetFit, MemoryEstimate, ModelShape, PlannedGeneration, PlannedTraining, TrainingMethod,
    },
    format_gb,
};
use formats::ModelOutline;
use hardware::{host_files::LiveFiles, host_snapshot::HostSnapshot};
use serde_json::json;

use crate::{
    args::{EstimateArgs, EstimateMethod},
    output,
};

const BYTES_PER_GIB: u64 = 1 << 30;

/// Memory budgets of common boxes: 80 % of 124 GiB with unified memory, or a card's memory without
/// the 1 GiB that a desktop takes.
const KNOWN_BOXES: [(&str, u64); 3] = [
    ("Strix Halo, 128 GB", 99 * BYTES_PER_GIB),
    ("R9700, 32 GB", 31 * BYTES_PER_GIB),
    ("MI50, 32 GB", 31 * BYTES_PER_GIB),
];

pub(super) fn run_estimate(args: &EstimateArgs, model: &Path, json: bool) -> anyhow::Result<()> {
    let shape = read_model_shape(model)?;
    let training = PlannedTraining {
        method: match args.method {
            EstimateMethod::Lora => TrainingMethod::Lora { rank: u64::from(args.rank) },
            EstimateMethod::Full => TrainingMethod::Full,
        },
        batch: u64::from(args.batch),
        sequence: u64::from(args.seq),
        bytes_per_weight: args.dtype.byte_size() as u64,
        checkpointing: args.checkpointing,
        eager_attention: args.eager,
        dropout: false,
        quantized: false,
    };
    let estimate = shape.estimate_training(&training);
    let tokens = args.tokens.unwrap_or(args.seq.saturating_mul(2));
    let generation = shape.estimate_generation(&PlannedGeneration {
        sequences: u64::from(args.sequences),
        tokens: u64::from(tokens),
        bytes_per_weight: training.bytes_per_weight,
    });
    let boxes = list_boxes(args)?;
    if json {
        let fits = |estimate: &MemoryEstimate, training: Option<&PlannedTraining>| {
            let verdicts = boxes.iter().map(|(name, budget)| {
                let verdict = estimate.budget_fit(*budget);
                let change =
                    training.and_then(|training| suggest_changes(&shape, training, *budget));
                json!({ "box": name, "budget": budget, "verdict": verdict, "change": change })
            });
            verdicts.collect::<Vec<_>>()
        };
        let mut document = serde_json::to_value(estimate)?;
        document["fits"] = json!(fits(&estimate, Some(&training)));
        document["generation"] = json!({
            "peak_bytes": generation.peak_bytes,
            "parts": generation.parts,
            "fits": fits(&generation, None),
        });
        return output::print_json(&document);
    }
    print_training(&shape, &training, &estimate, &boxes);
    output::print_line("");
    output::print_line(&format!("generating {} sequences of {tokens} tokens", args.sequences));
    print_generation(&generation, &boxes);
    Ok(())
}

fn list_boxes(args: &EstimateArgs) -> anyhow::Result<Vec<(String, u64)>> {
    let mut boxes: Vec<_> =
        KNOWN_BOXES.iter().map(|(name, budget)| ((*name).to_owned(), *budget)).collect();
    let here = HostSnapshot::take_snapshot(&LiveFiles::new("/"));
    boxes.extend(doctor::memory_budget(&here).map(|budget| ("this box".to_owned(), budget)));
    if let Some(path) = &args.from {
        let seen = super::read_captured_box(path)?;
        let budget = doctor::memory_budget(&seen)
            .with_context(|| format!("{} has no GPU with known memory", path.display()))?;
        boxes.push((path.display().to_string(), budget));
    }
    Ok(boxes)
}

pub(crate) fn read_model_shape(model: &Path) -> anyhow::Result<ModelShape> {
    if model.is_dir() {
        return Ok(ModelOutline::from_dir(model)?.shape);
    }
    let text =
        std::fs::read_to_string(model).with_context(|| format!("read {}", model.display()))?;
    let map = serde_json::from_str(&text)
        .with_context(|| format!("{} is not a JSON object", model.display()))?;
    Ok(ModelOutline::from_json(&map, model)?.shape)
}

fn print_training(
    shape: &ModelShape,
    training: &PlannedTraining,
    estimate: &MemoryEstimate,
    boxes: &[(String, u64)],
) {
    output::print_line(&format!(
        "{} parameters, {} trainable ({:.4} % of {})",
        shape.parameter_count(),
        estimate.trainable,
        100.0 * estimate.trainable as f64 / estimate.total as f64,
        estimate.total
    ));
    let parts = &estimate.parts;
    let rows = [
        ("weights", parts.weights),
        ("gradients, moments, adapter", parts.training),
        ("kept for the backward pass", parts.kept),
        ("one layer recomputed", parts.layer),
        ("logits", parts.logits),
        ("overhead", parts.overhead),
    ];
    print_parts(&rows, estimate.peak_bytes, "± 10 %");
    for (name, budget) in boxes {
        let change = suggest_changes(shape, training, *budget);
        let change = change.map(|change| format!("; with {change}")).unwrap_or_default();
        output::print_line(&format!("{}{change}", verdict_text(name, *budget, estimate)));
    }
}

fn print_generation(estimate: &MemoryEstimate, boxes: &[(String, u64)]) {
    let parts = &estimate.parts;
    let rows = [
        ("weights", parts.weights),
        ("keys and values, twice", parts.kv_cache),
        ("overhead", parts.overhead),
    ];
    print_parts(&rows, estimate.peak_bytes, "± 20 %");
    for (name, budget) in boxes {
        output::print_line(&verdict_text(name, *budget, estimate));
    }
}

fn print_parts(rows: &[(&str, u64)], peak: u64, tolerance: &str) {
    for (name, bytes) in rows {
        output::print_line(&format!("  {name:<28}{:>12}", format_gb(*bytes)));
    }
    output::print_line(&format!("  {:<28}{:>12}  ({tolerance})", "peak", format_gb(peak)));
}

fn verdict_text(name: &str, budget: u64, estimate: &MemoryEstimate) -> String {
    let verdict = match estimate.budget_fit(budget) {
        BudgetFit::Fits => "fits",
        BudgetFit::Tight => "tight",
        BudgetFit::DoesNotFit => "does not fit",
    };
    format!("{name} ({}): {verdict}", format_gb(budget))
}

fn suggest_changes(shape: &ModelShape, training: &PlannedTraining, budget: u64) -> Option<String> {
    if shape.estimate_training(training).budget_fit(budget) == BudgetFit::Fits {
        return None;
    }
    match shape.shrink_to_fit(training, budget, true) {
        Some((changes, _)) if changes.is_empty() => None,
        Some((changes, smaller)) => {
            Some(format!("{}: {}", changes.join(", "), format_gb(smaller.peak_bytes)))
        }
        None => Some("a smaller model".into()),
    }
}
