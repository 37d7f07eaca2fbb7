//! `flotilla objective`: lists training objectives, and computes the weights of tokens.

use std::{fs, io::Read, path::Path};

use anyhow::Context;
use objective::{Objective, ObjectiveName, TokenWeights, compute_weights, read_scored_lines};
use serde_json::json;

use crate::{args::ObjectiveCommand, args::WeightsArgs, output};

pub(crate) fn run_objective(command: &ObjectiveCommand, json: bool) -> anyhow::Result<()> {
    match command {
        ObjectiveCommand::List => list_objectives(json),
        ObjectiveCommand::Weights(args) => print_weights(args, json),
    }
}

fn list_objectives(json: bool) -> anyhow::Result<()> {
    let all = ObjectiveName::ALL.map(Objective::new);
    let settings = |it: &Objective| -> serde_json::Map<String, serde_json::Value> {
        it.settings().map(|(key, value)| (key.to_string(), json!(value))).collect()
    };
    let needs = |it: &Objective| it.requirements().iter().map(ToString::to_string).collect();
    let entry = |it: &Objective| -> serde_json::Value {
        let needs: Vec<String> = needs(it);
        json!({ "objective": it.name(), "settings": settings(it), "needs": needs })
    };
    let entries: Vec<_> = all.iter().map(entry).collect();
    output::print_json_or(json, &entries, || {
        let rows = all.iter().map(|it| {
            let shown = it.settings().filter(|(_, value)| *value != Some(0.0));
            let shown = shown.map(|(key, value)| {
                format!("{key}={}", value.map_or("?".to_owned(), |it| it.to_string()))
            });
            let needs: Vec<String> = needs(it);
            let shown = shown.collect::<Vec<_>>().join(" ");
            [it.name().as_str().to_owned(), shown, output::text_or_dash(needs.join(", "))]
        });
        output::print_table(["objective", "settings", "needs"], rows);
    })
}

fn print_weights(args: &WeightsArgs, json: bool) -> anyhow::Result<()> {
    let mut objective = Objective::new(ObjectiveName::find(&args.objective)?);
    for setting in &args.set {
        let (key, value) = setting.split_once('=').with_context(|| {
            format!("--set {setting}: write KEY=VALUE, such as kl=0.001 (O101)")
        })?;
        let value =
            value.parse().with_context(|| format!("--set {setting}: not a number (O101)"))?;
        objective.set(key, value).with_context(|| format!("--set {setting}"))?;
    }
    let name = args.input.display().to_string();
    let text = read_input(&args.input)?;
    let sequences = read_scored_lines(&text).with_context(|| name.clone())?;
    let TokenWeights { weights, voided, clipped } =
        compute_weights(&objective, &sequences).with_context(|| name.clone())?;
    for (sequence, weights) in sequences.iter().zip(&weights) {
        if json {
            let line = json!({ "prompt_id": sequence.prompt_id, "weights": weights });
            output::print_json(&line)?;
        } else {
            let shown: Vec<String> = weights.iter().map(|weight| format!("{weight:.6}")).collect();
            output::print_line(&format!("{}  {}", sequence.prompt_id, shown.join(" ")));
        }
    }
    if voided > 0 {
        output::print_message(&format!(
            "{voided} of {} sequences do not count: a log-probability is not finite",
            sequences.len()
        ));
    }
    if clipped > 0 {
        let limit = objective::WEIGHT_MAX;
        output::print_message(&format!("{clipped} weights were clipped to {limit}"));
    }
    Ok(())
}

/// Reads a file, or stdin for `-`.
fn read_input(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    if path == Path::new("-") {
        std::io::stdin().lock().read_to_string(&mut text).context("read stdin")?;
    } else {
        text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    }
    Ok(text)
}
