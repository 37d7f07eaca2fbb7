//! The files and data sets that a configuration names, as a spec names them.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{
    key_rules::DataField, report::KeyStatus, settings::DataEntry, spec_draft::SpecDraft,
    spec_tree::write_value,
};

/// Formats that Hugging Face's `load_dataset` takes in place of a name, for local files.
const FILE_FORMATS: [&str; 6] = ["json", "jsonl", "csv", "parquet", "text", "arrow"];

/// The field of a conversation; its turns may have the names of ShareGPT or of `messages`.
const CONVERSATIONS: &str = "conversations";

/// Addresses in LLaMA-Factory's list that a run cannot read. They come before an entry's file.
const OTHER_ADDRESSES: [&str; 4] = ["ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"];

/// The tags in LLaMA-Factory's list, each with the values that a run reads in conversations.
const TAGS: [(&str, &[&str]); 7] = [
    ("role_tag", &["from", "role"]),
    ("content_tag", &["value", "content"]),
    ("user_tag", &["human", "user"]),
    ("assistant_tag", &["gpt", "assistant"]),
    ("observation_tag", &["observation", "tool"]),
    ("function_tag", &["function_call"]),
    ("system_tag", &["system"]),
];

/// A file or data set as the spec names it, with the key that names it.
pub(crate) struct DataSource {
    pub(crate) key: String,
    pub(crate) location: String,
    /// The columns that do not have the names of their fields, by field.
    pub(crate) columns: BTreeMap<String, String>,
    /// What a run does not use of the data set's description.
    pub(crate) unused: Option<String>,
}

impl DataSource {
    /// Returns the end of a note with what a run does not use; empty if that is nothing.
    pub(crate) fn describe_unused(&self) -> String {
        self.unused.as_ref().map(|unused| format!("; {unused}")).unwrap_or_default()
    }

    /// Describes location and columns as the spec writes them.
    pub(crate) fn describe(&self) -> String {
        let location = json!(self.location).to_string();
        match self.columns.is_empty() {
            true => location,
            false => format!("{location}, columns {}", write_value(&json!(self.columns))),
        }
    }

    /// Returns true for the name of an older data set, such as `imdb`, which has no owner.
    pub(crate) fn lacks_owner(&self) -> bool {
        let name = self.location.strip_prefix(spec::HUB_PREFIX);
        let repository = name.and_then(|name| name.split(':').next());
        repository.is_some_and(|repository| !repository.contains('/'))
    }
}

/// Lists the files and data sets of an entry. Those that cannot be found are noted.
pub(crate) fn list_sources(draft: &mut SpecDraft<'_>, entry: &DataEntry) -> Vec<DataSource> {
    let columns = list_columns(entry);
    let source = |key: &String, location: String| DataSource {
        key: key.clone(),
        location,
        columns: columns.clone(),
        unused: None,
    };
    if let Some((key, names)) = entry.get(&DataField::Registered) {
        let registry = entry.get(&DataField::Registry).and_then(|(_, texts)| texts.first());
        let directory = registry.map_or("data", String::as_str);
        let found = names.iter().map(|name| find_registered(draft, key, directory, name));
        return found.collect::<Result<_, String>>().unwrap_or_else(|explanation| {
            draft.settings.add_note(key, KeyStatus::Differs, explanation);
            Vec::new()
        });
    }
    let path = entry.get(&DataField::Path);
    let by_files = path.is_none_or(|(_, paths)| paths.iter().all(|path| is_format(path)));
    let Some((key, files)) = entry.get(&DataField::Files).filter(|(_, files)| !files.is_empty())
    else {
        let paths = path.into_iter().flat_map(|(key, paths)| paths.iter().map(move |it| (key, it)));
        return paths.map(|(key, path)| source(key, locate_data(path, entry))).collect();
    };
    if by_files {
        if let Some((key, _)) = path {
            let explanation = "the format is read from the file's name".to_owned();
            draft.settings.add_note(key, KeyStatus::Ignored, explanation);
        }
        return files.iter().map(|file| source(key, file.clone())).collect();
    }
    let explanation = "all files of the data set are read; write these to a file and pass --data";
    draft.settings.add_note(key, KeyStatus::Differs, explanation.to_owned());
    let paths = path.into_iter().flat_map(|(key, paths)| paths.iter().map(move |it| (key, it)));
    paths.map(|(key, path)| source(key, locate_data(path, entry))).collect()
}

/// Notes that a source became a field of the spec, and what a run does not use of it.
pub(crate) fn note_source(draft: &mut SpecDraft<'_>, source: &DataSource, field: &str) {
    draft.settings.note_field(&source.key, field, &source.describe());
    if source.unused.is_some() {
        let explanation = format!("{field}: {}{}", source.describe(), source.describe_unused());
        draft.settings.add_note(&source.key, KeyStatus::Differs, explanation);
    }
}

/// Returns the columns of an entry that do not have the names of their fields, by field.
pub(crate) fn list_columns(entry: &DataEntry) -> BTreeMap<String, String> {
    let column = |(field, (_, names)): (&DataField, &(String, Vec<String>))| {
        let DataField::Column(field) = field else { return None };
        let [name] = &names[..] else { return None };
        (!is_known_column(field, name)).then(|| ((*field).to_owned(), name.clone()))
    };
    entry.iter().filter_map(column).collect()
}

/// Notes the keys of an entry that name columns. `place` is the field of the spec with the
/// mapping.
pub(crate) fn note_columns(
    draft: &mut SpecDraft<'_>,
    entry: &DataEntry,
    (place, mapping): (&str, &BTreeMap<String, String>),
) {
    for (field, (key, names)) in entry {
        let DataField::Column(field) = field else { continue };
        let name = names.join(", ");
        if is_known_column(field, &name) {
            draft.settings.add_note(key, KeyStatus::Ignored, "a run does the same".to_owned());
        } else if mapping.get(*field) == Some(&name) {
            let explanation = json!(name).to_string();
            draft.settings.note_field(key, &format!("{place}.{field}"), &explanation);
        } else {
            let explanation = format!("no columns are mapped; rename {name} to {field}");
            draft.settings.add_note(key, KeyStatus::Differs, explanation);
        }
    }
}

/// Returns true for a column that is read without a mapping.
fn is_known_column(field: &str, name: &str) -> bool {
    name == field || (field == CONVERSATIONS && ["messages", "conversation"].contains(&name))
}

/// Returns the location as a spec names it: a path unchanged, a data set of the hub with its
/// prefix, subset and split.
pub(crate) fn locate_data(path: &str, entry: &DataEntry) -> String {
    let part = |field| {
        let text = entry.get(&field).and_then(|(_, texts)| texts.first());
        text.map(String::as_str)
    };
    match is_local(path) {
        true => path.to_owned(),
        false => locate_dataset(path, part(DataField::Subset), part(DataField::Split)),
    }
}

fn locate_dataset(path: &str, subset: Option<&str>, split: Option<&str>) -> String {
    let [subset, split] = [subset, split].map(|part| part.filter(|text| is_hub_part(text)));
    match (subset, split) {
        (Some(subset), split) => format!("hub:{path}:{subset}/{}", split.unwrap_or("train")),
        (None, Some(split)) if split != "train" => format!("hub:{path}:{split}"),
        (None, _) => format!("hub:{path}"),
    }
}

/// Returns true if an entry names a data set of the hub.
pub(crate) fn names_hub(entry: &DataEntry) -> bool {
    let path = entry.get(&DataField::Path);
    path.is_some_and(|(_, paths)| paths.iter().any(|path| !is_local(path) && !is_format(path)))
}

/// Returns true for a split or subset that can be named, and not for a slice such as `train[:9]`.
pub(crate) fn is_hub_part(text: &str) -> bool {
    !text.is_empty()
        && text.chars().all(|sign| sign.is_ascii_alphanumeric() || ['-', '_', '.'].contains(&sign))
}

fn is_format(path: &str) -> bool {
    FILE_FORMATS.contains(&path)
}

fn is_local(path: &str) -> bool {
    path.starts_with(['.', '/', '~'])
        || path.contains("://")
        || path.split('/').count() > 2
        || FILE_FORMATS.iter().any(|format| path.ends_with(&format!(".{format}")))
        || [".tsv", ".txt", ".gz"].iter().any(|ending| path.ends_with(ending))
}

/// Looks up a name in LLaMA-Factory's list of data sets. Fails with the reason.
fn find_registered(
    draft: &SpecDraft<'_>,
    key: &str,
    directory: &str,
    name: &str,
) -> Result<DataSource, String> {
    let list = format!("{directory}/dataset_info.json");
    let Some(text) = (draft.options.read_file)(&list) else {
        return Err(format!("{list} cannot be read; name the file of {name} with --data"));
    };
    let registry: Value = serde_json::from_str(&text).unwrap_or_default();
    let entry = &registry[name];
    let has_other = OTHER_ADDRESSES.iter().any(|address| entry[*address].is_string());
    let location = match (entry["hf_hub_url"].as_str(), entry["file_name"].as_str()) {
        (Some(path), _) => locate_dataset(path, entry["subset"].as_str(), entry["split"].as_str()),
        (None, Some(file)) if !has_other => format!("{directory}/{file}"),
        _ => return Err(format!("{list} has no file for {name}; name one with --data")),
    };
    let columns = registered_columns(&entry["columns"]).map_err(|explanation| {
        format!("{list}: {name} has {explanation}; name a file with --data")
    })?;
    let unused = list_unused(entry);
    let unused = (!unused.is_empty()).then(|| {
        let unused = unused.join(", ");
        format!(
            "a run does not use {unused} of {name} in {list}: write the rows to a file, and pass \
             --data"
        )
    });
    Ok(DataSource { key: key.to_owned(), location, columns, unused })
}

/// Lists the fields of an entry in LLaMA-Factory's list that a run does not follow.
fn list_unused(entry: &Value) -> Vec<String> {
    let given = ["num_samples", "folder"].into_iter().filter(|field| !entry[*field].is_null());
    // A slice such as `train[:9]` is no part of a data set's name.
    let slices = ["subset", "split"].into_iter().filter(|field| {
        let text = entry[*field].as_str().filter(|text| !text.is_empty());
        text.is_some_and(|text| !is_hub_part(text))
    });
    let tags = TAGS.iter().filter(|(tag, known)| {
        entry["tags"][*tag].as_str().is_some_and(|written| !known.contains(&written))
    });
    let tags = tags.map(|(tag, _)| format!("tags.{tag}"));
    given.chain(slices).map(str::to_owned).chain(tags).collect()
}

/// Returns the columns that an entry of LLaMA-Factory's list names, by field. Fails with the
/// reason.
fn registered_columns(columns: &Value) -> Result<BTreeMap<String, String>, &'static str> {
    let has_pairs = columns["chosen"].is_string();
    if has_pairs && columns["query"].is_string() {
        return Err("prompts in two columns, beside pairs of answers");
    }
    let fields = [
        ("prompt", if has_pairs { "prompt" } else { "instruction" }),
        ("query", "input"),
        ("response", "output"),
        ("history", "history"),
        ("system", "system"),
        ("messages", CONVERSATIONS),
        ("chosen", "chosen"),
        ("rejected", "rejected"),
    ];
    let column = |(theirs, field): (&str, &str)| {
        let name = columns[theirs].as_str().filter(|name| !name.is_empty())?;
        (!is_known_column(field, name)).then(|| (field.to_owned(), name.to_owned()))
    };
    Ok(fields.into_iter().filter_map(column).collect())
}
