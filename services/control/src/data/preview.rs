//! A look at the data of a run before it starts: statistics, and the first prompts or examples as
//! the model would receive them.

use std::{collections::BTreeMap, path::Path};

use chat_template::ChatTemplate;
use data_files::{ColumnMapping, DataPurpose};
use hub::HubClient;
use serde::Serialize;
use spec::{BaseSpec, ChatSpec, RunSpec};
use wire::v1::DataFile;

use super::{
    error::DataError,
    model_dir::find_model_dir,
    offline::{NamedRows, ReadData, read_data},
    prepare::chat_format,
};
use crate::{
    SpecFiles, SubmitError,
    base_model::run_blocking,
    model_comparison::{CATEGORIES_MAX, CATEGORY_FIELD},
};

/// The settings of a run by which rows become prompts or examples.
#[derive(Debug, Clone, Default)]
pub struct PreviewSettings {
    /// `None`: by the fields of the rows.
    purpose: Option<DataPurpose>,
    chat: ChatSpec,
    /// A model that needs no fleet. Absent: conversations are written with their roles.
    model: Option<String>,
}

/// Statistics of rows, and the first of them.
#[derive(Debug, Serialize)]
pub struct DataPreview {
    pub file: DataFile,
    /// The name of a data set with its commit.
    pub pinned: Option<String>,
    /// Number of rows that have each column of the file.
    pub columns: BTreeMap<String, u64>,
    /// Number of rows of each category.
    pub categories: BTreeMap<String, u64>,
    pub warnings: Vec<String>,
    pub rows: Vec<PreviewRow>,
}

/// A prompt or an example as the model would receive it.
#[derive(Debug, Serialize)]
pub struct PreviewRow {
    /// Such as `line 3`.
    pub place: String,
    pub prompt: String,
    /// Absent for prompts.
    pub completion: Option<String>,
    pub answer: Option<String>,
}

/// The reason why rows cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum DataPreviewError {
    #[error(transparent)]
    Data(#[from] DataError),
    /// The model with the chat template.
    #[error(transparent)]
    Model(#[from] SubmitError),
}

impl PreviewSettings {
    /// Takes the settings of a spec, and the columns from which it takes fields.
    pub fn from_spec(spec: &RunSpec) -> (Self, ColumnMapping) {
        let (purpose, chat, columns) = match (&spec.sft, &spec.raft) {
            (Some(sft), _) => (DataPurpose::Examples, &sft.chat, &sft.columns),
            (None, Some(raft)) => (DataPurpose::Prompts, &raft.chat, &raft.columns),
            (None, None) => return (Self::default(), ColumnMapping::new()),
        };
        let BaseSpec { model, .. } = &spec.base;
        let model = model.clone().filter(|name| !name.starts_with("store:"));
        (Self { purpose: Some(purpose), chat: chat.clone(), model }, columns.clone())
    }

    /// Renders conversations with the chat template of a model on this machine or the hub.
    #[must_use]
    pub fn with_model(self, model: &str) -> Self {
        Self { model: Some(model.to_owned()), ..self }
    }
}

/// Returns statistics and the first rows. A model's name is a directory below `directory`, or that
/// of a model on the hub.
///
/// # Errors
/// A row cannot be used, or the model has no chat template that renders the conversations.
pub async fn preview_rows(
    named: &NamedRows,
    settings: &PreviewSettings,
    directory: &Path,
    rows: usize,
) -> Result<DataPreview, DataPreviewError> {
    let template = match &settings.model {
        Some(model) => load_template(named, model, directory).await?,
        None => ChatTemplate::for_readers(),
    };
    let (named, settings) = (named.clone(), settings.clone());
    let preview = run_blocking(move || build_preview(&named, &settings, &template, rows));
    Ok(preview.await?)
}

async fn load_template(
    named: &NamedRows,
    model: &str,
    directory: &Path,
) -> Result<ChatTemplate, SubmitError> {
    let files = SpecFiles::Local(directory.to_owned());
    let found = find_model_dir(&HubClient::from_env(), model, &files).await?;
    let loaded = run_blocking(move || ChatTemplate::load(found.dir_path(), jiff::Zoned::now)).await;
    loaded.map_err(|source| {
        SubmitError::data_error("base", DataError::Template { file: named.name.clone(), source })
    })
}

fn build_preview(
    named: &NamedRows,
    settings: &PreviewSettings,
    template: &ChatTemplate,
    rows: usize,
) -> Result<DataPreview, DataError> {
    let data = read_data(named, settings.purpose, chat_format(Some(template), &settings.chat))?;
    let (mut file, mut warnings) = data.build_statistics(&named.name);
    if settings.model.is_none() && file.rendered > 0 {
        file.rendered = 0;
        let shown = "conversations are shown with their roles; name the base with --base to see \
                     them in its chat template";
        warnings.push(format!("{}: {shown}", named.name));
    }
    let shaped = data.shaped_rows();
    Ok(DataPreview {
        pinned: named.pinned.clone(),
        columns: shaped.columns.clone(),
        categories: count_categories(&data),
        warnings,
        rows: first_rows(&data, rows),
        file,
    })
}

fn first_rows(data: &ReadData, rows: usize) -> Vec<PreviewRow> {
    match data {
        ReadData::Examples(examples, _) => {
            let first = examples.examples.iter().take(rows).map(|example| PreviewRow {
                place: example.place.to_string(),
                prompt: example.prompt.clone(),
                completion: Some(example.completion.clone()),
                answer: None,
            });
            first.collect()
        }
        ReadData::Prompts(prompts, _) => {
            let first = prompts.prompts.iter().take(rows).map(|numbered| PreviewRow {
                place: numbered.place.to_string(),
                prompt: numbered.prompt.prompt.clone(),
                completion: None,
                answer: numbered.prompt.answer.clone(),
            });
            first.collect()
        }
    }
}

/// Counts the rows of each category, up to a number of categories.
fn count_categories(data: &ReadData) -> BTreeMap<String, u64> {
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for row in data.shaped_rows().rows.parse_rows().into_iter().flatten().flatten() {
        let Some(category) = row.fields.get(CATEGORY_FIELD).and_then(|it| it.as_str()) else {
            continue;
        };
        if counts.len() < CATEGORIES_MAX || counts.contains_key(category) {
            *counts.entry(category.to_owned()).or_default() += 1;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, content: &'static str, columns: &[(&str, &str)]) -> NamedRows {
        let content = content.as_bytes().into();
        NamedRows {
            name: name.to_owned(),
            rows: super::super::file_rows::read_rows(name, &content).unwrap(),
            columns: columns.iter().map(|(a, b)| ((*a).into(), (*b).into())).collect(),
            pinned: None,
        }
    }

    fn preview(named: &NamedRows, settings: &PreviewSettings) -> DataPreview {
        build_preview(named, settings, &ChatTemplate::for_readers(), 1).unwrap()
    }

    #[test]
    fn rows_are_shown_as_a_run_would_use_them() {
        let table = named(
            "q.csv",
            "question,solution,category\n\"1+1\n=\",2,add\n2+2=,4,add\n2-1=,1,\n",
            &[("prompt", "question"), ("answer", "solution")],
        );
        let shown = preview(&table, &PreviewSettings::default());
        assert_eq!(
            (shown.file.lines, shown.columns["question"], shown.columns["category"]),
            (3, 3, 2)
        );
        assert_eq!(shown.categories, BTreeMap::from([("add".to_owned(), 2)]));
        let [row] = &shown.rows[..] else { panic!("one row") };
        assert_eq!(
            (&*row.place, &*row.prompt, row.answer.as_deref()),
            ("line 2", "1+1\n=", Some("2"))
        );
        assert_eq!(row.completion, None);

        let chats = named(
            "c.json",
            r#"[{"conversations": [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}]}]"#,
            &[],
        );
        let shown = preview(&chats, &PreviewSettings::default());
        assert_eq!(shown.file.shapes, ["sharegpt"]);
        let [row] = &shown.rows[..] else { panic!("one row") };
        let texts = (&*row.place, &*row.prompt, row.completion.as_deref());
        assert_eq!(texts, ("row 1", "user: 2+2=\nassistant: ", Some("4\n")));
        assert!(shown.warnings[0].contains("--base"), "{:?}", shown.warnings);

        let prompts = PreviewSettings { purpose: Some(DataPurpose::Prompts), ..Default::default() };
        let shown = preview(&chats, &prompts);
        assert_eq!(shown.rows[0].answer.as_deref(), Some("4"));
        assert_eq!(shown.rows[0].completion, None);
    }

    #[test]
    fn a_spec_says_how_rows_are_used() {
        let spec = "base: { model: org/m }\nraft: { prompts: q.csv, verifier: { exact: {} }, \
                    columns: { prompt: question }, chat: true }\n";
        let (settings, columns) = PreviewSettings::from_spec(&RunSpec::parse(spec).unwrap());
        assert_eq!(settings.purpose, Some(DataPurpose::Prompts));
        assert_eq!((settings.model.as_deref(), settings.chat.wraps_texts()), (Some("org/m"), true));
        assert_eq!(columns["prompt"], "question");
    }
}
