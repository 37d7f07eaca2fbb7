//! The metadata at the start of a card, as the hub reads it.

use std::collections::BTreeSet;

use hub::{DatasetName, ModelLicense};
use serde_json::{Value, json};
use spec::HUB_PREFIX;
use wire::v1::spec::DataSource;

use super::{CardFacts, ModelForm, results::held_out_figures};

/// A figure outside of this is not a number for every reader of YAML.
const FIGURE_MAX: f64 = 1e12;

/// Returns the metadata in YAML. Its values are JSON, which is YAML, so that no text can end it.
pub(super) fn front_matter(facts: &CardFacts<'_>) -> String {
    let mut lines = vec!["---".to_owned()];
    let mut push = |key: &str, value: Value| lines.push(format!("{key}: {value}"));
    if let Some(base) = facts.hub_base() {
        push("base_model", json!(base.repo));
        push("base_model_relation", json!(base_relation(facts)));
    }
    if let Some(ModelLicense { id, name, link }) = facts.license() {
        push("license", json!(id));
        name.iter().for_each(|name| push("license_name", json!(name)));
        link.iter().for_each(|link| push("license_link", json!(link)));
    }
    let datasets = list_datasets(&facts.run.spec.data_sources);
    if !datasets.is_empty() {
        push("datasets", json!(datasets));
    }
    push("library_name", json!(library_name(facts)));
    push("pipeline_tag", json!("text-generation"));
    push("tags", json!(list_tags(facts)));
    let results = list_results(facts);
    if !results.is_empty() {
        let name = facts.model_name();
        push("model-index", json!([{ "name": name, "results": results }]));
    }
    lines.push("---\n".to_owned());
    lines.join("\n")
}

/// Returns the repositories of the data sets that the run trains on, without those that it only
/// measures on.
fn list_datasets(sources: &[DataSource]) -> BTreeSet<String> {
    let is_measured = |field: &String| field.starts_with("evals") || field == "raft.heldout";
    let is_trained =
        |source: &&DataSource| source.fields.is_empty() || !source.fields.iter().all(is_measured);
    let repository = |source: &DataSource| {
        let name: DatasetName = source.name.strip_prefix(HUB_PREFIX)?.parse().ok()?;
        Some(name.id.repo)
    };
    sources.iter().filter(is_trained).filter_map(repository).collect()
}

fn base_relation(facts: &CardFacts<'_>) -> &'static str {
    if facts.is_adapter() { "adapter" } else { "finetune" }
}

fn library_name(facts: &CardFacts<'_>) -> &'static str {
    match facts.request.form {
        ModelForm::Gguf { .. } => "gguf",
        ModelForm::Stored | ModelForm::Merged if facts.is_adapter() => "peft",
        ModelForm::Stored | ModelForm::Merged => "transformers",
    }
}

fn list_tags(facts: &CardFacts<'_>) -> Vec<String> {
    let mut tags = vec!["flotilla".to_owned(), facts.run.kind_name().to_owned()];
    let training = facts.training();
    if training.is_some_and(|training| training.lora.is_some()) {
        tags.push("lora".to_owned());
    }
    let objective = training.and_then(|training| training.objective.as_ref());
    tags.extend(objective.map(|objective| objective.name.clone()));
    if matches!(facts.request.form, ModelForm::Gguf { .. }) {
        tags.push("gguf".to_owned());
    }
    tags
}

/// Returns the figures of the checkpoint, each with the digest of the text or the prompts.
fn list_results(facts: &CardFacts<'_>) -> Vec<Value> {
    let figures = held_out_figures(facts).into_iter();
    let finite = figures.filter_map(|figure| {
        let (value, _) = figure.after.filter(|(value, _)| value.abs() < FIGURE_MAX)?;
        let value = (value * 1e4).round() / 1e4;
        Some(json!({
            "task": { "type": "text-generation", "name": "Text generation" },
            "dataset": {
                "type": "held-out", "name": figure.suite, "revision": figure.digest,
            },
            "metrics": [{ "type": figure.metric, "name": figure.name, "value": value }],
        }))
    });
    finite.collect()
}
