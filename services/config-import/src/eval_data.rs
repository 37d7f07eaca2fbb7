//! The data that a configuration evaluates on, as evals or held-out prompts of the spec.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{
    data_source::{
        DataSource, is_hub_part, list_columns, list_sources, locate_data, names_hub, note_columns,
        note_source,
    },
    key_rules::DataField,
    report::KeyStatus,
    setting::Setting,
    settings::DataEntry,
    spec_draft::SpecDraft,
    task::TrainingTask,
};

const HELDOUT: &str = "raft.heldout";

/// Adds the data to evaluate on. `columns` are the training data's.
pub(crate) fn add_eval_data(draft: &mut SpecDraft<'_>, columns: &BTreeMap<String, String>) {
    let is_sft = draft.task == TrainingTask::Sft;
    let entries = draft.settings.eval_entries();
    let mut sources = Vec::new();
    for (entry, training) in &entries {
        sources.extend(list_eval_sources(draft, entry, training));
    }
    sources.retain(|source| is_readable(draft, source));
    match &sources[..] {
        [] => {}
        all if is_sft => add_suites(draft, all),
        [source] if source.columns == *columns => {
            draft.tree.set_value(HELDOUT, source.location.as_str());
            note_source(draft, source, HELDOUT);
        }
        all => {
            let unused: String = all.iter().map(DataSource::describe_unused).collect();
            let explanation = format!(
                "{HELDOUT} takes one file with the columns of the prompts: combine the {}{unused}",
                all.len()
            );
            for source in all {
                draft.settings.add_note(&source.key, KeyStatus::Differs, explanation.clone());
            }
        }
    }
    for (entry, _) in &entries {
        let own = list_columns(entry);
        let (place, mapping) = if is_sft { ("evals", &own) } else { ("raft.columns", columns) };
        note_columns(draft, entry, (place, mapping));
    }
    add_eval_share(draft, !sources.is_empty());
}

/// Lists the data of an entry: what it names, or another split of the training data.
fn list_eval_sources(
    draft: &mut SpecDraft<'_>,
    entry: &DataEntry,
    training: &DataEntry,
) -> Vec<DataSource> {
    let mut whole = entry.clone();
    let names = [DataField::Path, DataField::Files, DataField::Registered];
    let is_named = names.iter().any(|name| entry.contains_key(name));
    if is_named {
        let registry = training.get_key_value(&DataField::Registry);
        whole.extend(registry.map(|(field, value)| (*field, value.clone())));
    } else {
        let missing = training.iter().filter(|(field, _)| !entry.contains_key(*field));
        whole.extend(missing.map(|(field, value)| (*field, value.clone())));
    }
    let parts = [DataField::Split, DataField::Subset].into_iter();
    let parts: Vec<_> = parts.filter_map(|part| entry.get(&part)).collect();
    let is_hub = names_hub(&whole);
    for (key, texts) in &parts {
        let (status, explanation) = match &texts[..] {
            [text] if is_hub && is_hub_part(text) => {
                (KeyStatus::Used, "it is a part of the data set's name")
            }
            _ if is_hub => (KeyStatus::Differs, "name a file of these rows under evals"),
            _ => (KeyStatus::Ignored, "only a data set of the hub has splits"),
        };
        draft.settings.add_note(key, status, explanation.to_owned());
        if status == KeyStatus::Differs {
            return Vec::new();
        }
    }
    if is_named {
        return list_sources(draft, &whole);
    }
    let (Some((key, _)), Some((_, paths))) = (parts.first(), whole.get(&DataField::Path)) else {
        return Vec::new();
    };
    let source = |path: &String| DataSource {
        key: key.clone(),
        location: locate_data(path, &whole),
        columns: list_columns(&whole),
        unused: None,
    };
    paths.iter().filter(|_| is_hub).map(source).collect()
}

/// Returns false, with a note, for data that a run cannot read.
fn is_readable(draft: &mut SpecDraft<'_>, source: &DataSource) -> bool {
    let is_text = draft.task == TrainingTask::Sft && source.location.ends_with(".txt");
    let is_readable = spec::names_rows(&source.location) || is_text;
    let explanation = match source.lacks_owner() {
        true => "names of the hub are org/name: name it under evals as hub:ORG/NAME",
        false if is_readable => return true,
        false => "write them to a file, and name it under evals (docs/RUNS.md)",
    };
    draft.settings.add_note(&source.key, KeyStatus::Differs, explanation.to_owned());
    false
}

fn add_suites(draft: &mut SpecDraft<'_>, sources: &[DataSource]) {
    let suite = |(index, source): (usize, &DataSource)| {
        let name = match sources.len() {
            1 => "eval".to_owned(),
            _ => format!("eval-{}", index + 1),
        };
        let mut suite = json!({ "name": name, "text": source.location });
        if !source.columns.is_empty() {
            suite["columns"] = json!(source.columns);
        }
        suite
    };
    let suites: Vec<Value> = sources.iter().enumerate().map(suite).collect();
    draft.tree.set_value("evals", suites);
    // Of several with one key, the note on what differs must stay.
    let mut noted: Vec<&DataSource> = sources.iter().collect();
    noted.sort_by_key(|source| source.unused.is_some());
    for source in noted {
        note_source(draft, source, "evals");
    }
}

/// Holds a part of the prompts out, unless there is other data to evaluate on.
fn add_eval_share(draft: &mut SpecDraft<'_>, is_measured: bool) {
    let Some(share) = draft.settings.number_of(Setting::EvalShare).filter(|it| *it > 0.0) else {
        draft.settings.note_ignored(Setting::EvalShare, "nothing is held out");
        return;
    };
    if draft.task == TrainingTask::Sft {
        let explanation =
            "all examples are trained on; name a file of others under evals (docs/RUNS.md)";
        draft.settings.note_differs(Setting::EvalShare, explanation);
    } else if !is_measured {
        let size = if share < 1.0 { json!({ "share": share }) } else { json!({ "count": share }) };
        draft.set_field(Setting::EvalShare, HELDOUT, size);
    }
}
