//! `flotilla doctor estimate`: whether a training will fit, before it is tried.

use std::{path::Path, process::ExitCode};

use anyhow::Context;
use formats::Config;
use hardware::{
    doctor,
    estimate::{Estimate, Generation, Method, Shape, Training, Verdict},
    files::Live,
    snapshot::Snapshot,
};
use serde_json::json;

use super::capture;
use crate::{
    cli::{EstimateArgs, EstimateDtype, EstimateMethod},
    output,
};

const GIB: u64 = 1 << 30;

/// What a job may plan with on boxes people have: a unified one's 80 % of 124 GiB, a card's
/// memory without the 1 GiB a desktop takes.
const BOXES: [(&str, u64); 3] =
    [("Strix Halo, 128 GB", 99 * GIB), ("R9700, 32 GB", 31 * GIB), ("MI50, 32 GB", 31 * GIB)];

pub(super) fn estimate(args: &EstimateArgs, json: bool) -> anyhow::Result<ExitCode> {
    let shape = shape_of(&args.model)?;
    let training = Training {
        method: match args.method {
            EstimateMethod::Lora => Method::Lora { rank: u64::from(args.rank) },
            EstimateMethod::Full => Method::Full,
        },
        batch: u64::from(args.batch),
        sequence: u64::from(args.seq),
        bytes_per_weight: match args.dtype {
            EstimateDtype::F32 => 4,
            EstimateDtype::F16 | EstimateDtype::Bf16 => 2,
        },
        checkpointing: args.checkpointing,
        eager_attention: args.eager,
        dropout: false,
    };
    let estimate = shape.training(&training);
    let generation = shape.generation(&Generation {
        sequences: u64::from(args.sequences),
        tokens: u64::from(args.tokens.unwrap_or(args.seq.saturating_mul(2))),
        bytes_per_weight: training.bytes_per_weight,
    });
    let boxes = boxes(args)?;
    if json {
        let fits = |estimate: &Estimate, training: Option<&Training>| {
            let verdicts = boxes.iter().map(|(name, budget)| {
                let verdict = estimate.verdict(*budget);
                let change = training.and_then(|training| change(&shape, training, *budget));
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
        output::print_json(&document)?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&shape, &training, &estimate, &boxes);
    print_generation(args, &generation, &boxes);
    Ok(ExitCode::SUCCESS)
}

/// What people have, this box, and the one that was captured.
fn boxes(args: &EstimateArgs) -> anyhow::Result<Vec<(String, u64)>> {
    let mut boxes: Vec<_> =
        BOXES.iter().map(|(name, budget)| ((*name).to_owned(), *budget)).collect();
    let here = Snapshot::take(&Live::new("/"));
    boxes.extend(doctor::budget(&here).map(|budget| ("this box".to_owned(), budget)));
    if let Some(path) = &args.from {
        let named = || format!("read {}", path.display());
        let seen = Snapshot::take(&capture::read(path).with_context(named)?);
        let budget = doctor::budget(&seen)
            .with_context(|| format!("{} has no GPU whose memory is known", path.display()))?;
        boxes.push((path.display().to_string(), budget));
    }
    Ok(boxes)
}

/// Of a model's directory, or of its `config.json` alone.
pub(super) fn shape_of(model: &Path) -> anyhow::Result<Shape> {
    if model.is_dir() {
        return Ok(::trainer::shape(&Config::load(model)?));
    }
    let text =
        std::fs::read_to_string(model).with_context(|| format!("read {}", model.display()))?;
    let map = serde_json::from_str(&text)
        .with_context(|| format!("{} is not a JSON object", model.display()))?;
    Ok(::trainer::shape(&Config::from_json(&map, model)?))
}

fn print(shape: &Shape, training: &Training, estimate: &Estimate, boxes: &[(String, u64)]) {
    output::print(&format!(
        "{} parameters, {} of them trained ({:.4} % of {})",
        shape.parameters(),
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
    for (name, bytes) in rows {
        output::print(&format!("  {name:<28}{:>12}", gb(bytes)));
    }
    output::print(&format!("  {:<28}{:>12}  (± 10 %)", "peak", gb(estimate.peak_bytes)));
    for (name, budget) in boxes {
        let change = change(shape, training, *budget);
        let change = change.map(|change| format!("; with {change}")).unwrap_or_default();
        output::print(&format!("{}{change}", verdict(name, *budget, estimate)));
    }
}

fn print_generation(args: &EstimateArgs, estimate: &Estimate, boxes: &[(String, u64)]) {
    let parts = &estimate.parts;
    let tokens = args.tokens.unwrap_or(args.seq.saturating_mul(2));
    output::print(&format!("\ngenerating {} sequences of {tokens} tokens", args.sequences));
    for (name, bytes) in [
        ("weights", parts.weights),
        ("keys and values, twice", parts.kv_cache),
        ("overhead", parts.overhead),
    ] {
        output::print(&format!("  {name:<28}{:>12}", gb(bytes)));
    }
    output::print(&format!("  {:<28}{:>12}  (± 20 %)", "peak", gb(estimate.peak_bytes)));
    for (name, budget) in boxes {
        output::print(&verdict(name, *budget, estimate));
    }
}

fn gb(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}

fn verdict(name: &str, budget: u64, estimate: &Estimate) -> String {
    let verdict = match estimate.verdict(budget) {
        Verdict::Fits => "fits",
        Verdict::Tight => "tight",
        Verdict::DoesNotFit => "does not fit",
    };
    format!("{name} ({}): {verdict}", gb(budget))
}

/// What to change for it to fit, where it does not.
fn change(shape: &Shape, training: &Training, budget: u64) -> Option<String> {
    if shape.training(training).verdict(budget) == Verdict::Fits {
        return None;
    }
    Some(match shape.shrink(training, budget, true) {
        Some((changes, _)) if changes.is_empty() => return None,
        Some((changes, smaller)) => {
            format!("{}: {}", changes.join(", "), gb(smaller.peak_bytes))
        }
        None => "a smaller model".into(),
    })
}
