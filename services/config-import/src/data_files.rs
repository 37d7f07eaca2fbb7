//! The files of examples or prompts.

use std::collections::BTreeMap;

use serde_json::json;

use crate::{
    data_source::{
        DataSource, is_hub_part, list_columns, list_sources, names_hub, note_columns, note_source,
    },
    eval_data::add_eval_data,
    key_rules::DataField,
    report::KeyStatus,
    setting::Setting,
    settings::DataEntry,
    spec_draft::SpecDraft,
    task::TrainingTask,
};

/// Forms of examples with one text, or a plain prompt without the chat template's words.
const PLAIN_FORMS: [&str; 3] = ["alpaca", "completion", "input_output"];
const CHAT_FORMS: [&str; 5] = ["chat_template", "sharegpt", "chatml", "messages", "conversation"];

/// Sets the file to train on or to sample from, its columns, what is measured, and the chat
/// settings.
pub(crate) fn add_data(draft: &mut SpecDraft<'_>) {
    let entries = draft.settings.data_entries();
    let mut sources = Vec::new();
    for entry in &entries {
        note_details(draft, entry);
        sources.extend(match draft.options.data {
            Some(_) => list_replaced(entry),
            None => list_sources(draft, entry),
        });
    }
    add_file(draft, &sources);
    let columns = add_columns(draft, &entries, &sources);
    add_chat(draft, &entries);
    add_eval_data(draft, &columns);
}

/// Lists the data that `--data` replaces.
fn list_replaced(entry: &DataEntry) -> Vec<DataSource> {
    let names = [DataField::Path, DataField::Files, DataField::Registered];
    let keys = names.iter().filter_map(|field| entry.get(field));
    let source = |(key, _): &(String, Vec<String>)| DataSource {
        key: key.clone(),
        location: String::new(),
        columns: list_columns(entry),
        unused: None,
    };
    keys.map(source).collect()
}

fn add_file(draft: &mut SpecDraft<'_>, sources: &[DataSource]) {
    let field = draft.field_path(if draft.task == TrainingTask::Sft { "data" } else { "prompts" });
    match (draft.options.data, sources) {
        (Some(file), all) => {
            draft.tree.set_value(&field, file);
            let explanation = format!("--data names {file}");
            all.iter().for_each(|source| ignore_source(draft, source, &explanation));
        }
        (None, [source]) if source.lacks_owner() => {
            let explanation = "names of the hub are org/name: pass --data hub:ORG/NAME";
            draft.settings.add_note(&source.key, KeyStatus::Differs, explanation.to_owned());
            draft.tree.set_missing(&field, json!("hub:org/name"), explanation);
        }
        (None, [source]) => {
            draft.tree.set_value(&field, source.location.as_str());
            note_source(draft, source, &field);
            if draft.task.learns_preferences() {
                let explanation = format!(
                    "{field}: {:?}, of which only prompts are read: the verifier judges the run's \
                     own samples, not the answers in the data{}",
                    source.location,
                    source.describe_unused()
                );
                draft.settings.add_note(&source.key, KeyStatus::Differs, explanation);
            }
        }
        (None, []) => {
            let remedy = "name a file that can be read, with --data";
            draft.tree.set_missing(&field, json!("data.jsonl"), remedy);
        }
        (None, all) => {
            let unused: String = all.iter().map(DataSource::describe_unused).collect();
            let explanation = format!(
                "{field} takes one file: combine the {} and pass --data{unused}",
                all.len()
            );
            for source in all {
                draft.settings.add_note(&source.key, KeyStatus::Differs, explanation.clone());
            }
            let remedy =
                format!("combine the {} files into one and name it with --data", all.len());
            draft.tree.set_missing(&field, json!("all.jsonl"), &remedy);
        }
    }
}

/// Sets the columns that all files have, and returns them by field.
fn add_columns(
    draft: &mut SpecDraft<'_>,
    entries: &[DataEntry],
    sources: &[DataSource],
) -> BTreeMap<String, String> {
    let field = draft.field_path("columns");
    let first = sources.first().map(|source| source.columns.clone()).unwrap_or_default();
    let is_common = sources.iter().all(|source| source.columns == first);
    let columns = if is_common { first } else { BTreeMap::new() };
    if !columns.is_empty() {
        draft.tree.set_value(&field, json!(columns));
    }
    for entry in entries {
        note_columns(draft, entry, (field.as_str(), &columns));
    }
    columns
}

fn ignore_source(draft: &mut SpecDraft<'_>, source: &DataSource, explanation: &str) {
    draft.settings.add_note(&source.key, KeyStatus::Ignored, explanation.to_owned());
}

/// Notes the keys about a data set that do not name it.
fn note_details(draft: &mut SpecDraft<'_>, entry: &DataEntry) {
    for (field, (key, texts)) in entry {
        let text = texts.join(", ");
        let (status, explanation) = match field {
            DataField::Path | DataField::Files | DataField::Registered | DataField::Column(_) => {
                continue;
            }
            DataField::Registry => {
                (KeyStatus::Ignored, "names are looked up in its dataset_info.json".to_owned())
            }
            DataField::Form if draft.task == TrainingTask::Sft => describe_form(&text),
            DataField::Form => (
                KeyStatus::Used,
                "prompts need a field prompt or messages (docs/DATA.md)".to_owned(),
            ),
            DataField::Split | DataField::Subset if draft.options.data.is_some() => {
                (KeyStatus::Ignored, "--data names the data".to_owned())
            }
            DataField::Split | DataField::Subset if names_hub(entry) && is_hub_part(&text) => {
                (KeyStatus::Used, "it is a part of the data set's name".to_owned())
            }
            DataField::Split if text == "train" => {
                (KeyStatus::Ignored, "all rows of a file are used".to_owned())
            }
            DataField::Split | DataField::Subset => {
                let explanation =
                    format!("it is not chosen; write {text} to a file and pass --data");
                (KeyStatus::Differs, explanation)
            }
        };
        draft.settings.add_note(key, status, explanation);
    }
}

fn describe_form(form: &str) -> (KeyStatus, String) {
    let starts = |forms: &[&str]| forms.iter().any(|known| form.starts_with(known));
    if form.starts_with("completion") {
        (KeyStatus::Used, "lines of {\"text\"}: all of a text is scored".to_owned())
    } else if form == "auto" || starts(&PLAIN_FORMS) {
        (KeyStatus::Used, "the form of examples is read from their fields".to_owned())
    } else if starts(&CHAT_FORMS) {
        let explanation = "conversations, of which only the last answer is scored: split those with more \
                    (docs/DATA.md)";
        (KeyStatus::Used, explanation.to_owned())
    } else {
        let explanation = format!("{form} is unknown; write the fields that docs/DATA.md lists");
        (KeyStatus::Differs, explanation)
    }
}

/// Wraps plain prompts as messages if the program does so.
fn add_chat(draft: &mut SpecDraft<'_>, entries: &[DataEntry]) {
    let field = draft.field_path("chat");
    let template = draft.settings.word_of(Setting::ChatTemplate).filter(|it| !it.is_empty());
    let mut forms = entries.iter().filter_map(|entry| entry.get(&DataField::Form));
    let is_plain = |(_, forms): &(String, Vec<String>)| {
        forms.iter().any(|form| PLAIN_FORMS.iter().any(|plain| form.starts_with(plain)))
    };
    let is_plain = forms.any(is_plain);
    if let Some(system) = draft.settings.text_of(Setting::SystemPrompt) {
        draft.set_field(Setting::SystemPrompt, &field, json!({ "system": system }));
        draft.settings.note_ignored(Setting::ChatTemplate, "the base's own template is used");
        return;
    }
    match template {
        Some(_) if is_plain => {
            let explanation =
                "prompts of this form are plain; conversations use the base's own template";
            draft.settings.note_ignored(Setting::ChatTemplate, explanation);
        }
        Some(_) => {
            let explanation = "with the template of the base";
            draft.set_with_advice(Setting::ChatTemplate, &field, true, explanation);
        }
        None if draft.task == TrainingTask::Raft => {
            draft.tree.set_value(&field, true);
            let explanation =
                format!("{field}: true; halo-forge's own, about Windows programming, is left out");
            draft.settings.add_note("system_prompt", KeyStatus::Default, explanation);
        }
        None => {}
    }
}
