//! Tools for files of prompts or examples that need neither a fleet nor a model.

use std::path::Path;

use bytes::Bytes;
use chat_template::ChatTemplate;
use data_files::{ColumnMapping, DataPurpose, JsonRows, RowShape, ShapedRows};
use hub::HubClient;
use spec::{HUB_PREFIX, HeldoutSize};
use wire::{PromptEntry, v1::DataFile};

use super::{
    error::DataError,
    examples::{self, ExampleFile},
    file_rows::{add_shapes, read_rows, shape_rows, shape_warnings},
    heldout_split::{find_duplicates, split_prompts},
    hub_data::fetch_hub_data,
    prompts::{ChatFormat, PromptFile},
    statistics,
};
use crate::{
    base_model::{TransferCallback, run_blocking},
    spec_files::read_named_data,
};

/// The rows of a file, or of a data set of the hub, that a user named in a command.
#[derive(Debug, Clone)]
pub struct NamedRows {
    pub name: String,
    pub(super) rows: JsonRows,
    /// The columns from which fields are taken, by the names of the fields.
    pub(super) columns: ColumnMapping,
    /// The name of a data set with its commit.
    pub pinned: Option<String>,
}

impl NamedRows {
    /// Reads a file, or downloads the data set that a name such as `hub:org/name` stands for.
    ///
    /// # Errors
    /// The file is missing or damaged, or the hub does not have the data set.
    pub async fn read(
        path: &Path,
        columns: ColumnMapping,
        watch: &TransferCallback,
    ) -> Result<Self, DataError> {
        let name = path.display().to_string();
        let (content, pinned) = if name.starts_with(HUB_PREFIX) {
            let data = fetch_hub_data(&HubClient::from_env(), &name, watch).await?;
            (data.lines, Some(data.pinned))
        } else {
            (read_named_data(path)?, None)
        };
        let named = name.clone();
        let rows = run_blocking(move || read_rows(&named, &content)).await?;
        Ok(Self { name, rows, columns, pinned })
    }

    /// Reads a file whose columns have the names of their fields.
    fn read_file(path: &Path) -> Result<Self, DataError> {
        let name = path.display().to_string();
        let rows = read_rows(&name, &read_named_data(path)?)?;
        Ok(Self { name, rows, columns: ColumnMapping::new(), pinned: None })
    }

    pub(super) fn shape_for(&self, purpose: DataPurpose) -> Result<ShapedRows, DataError> {
        shape_rows(&self.name, &self.rows, &self.columns, purpose)
    }

    /// Reads prompts that are text.
    fn read_prompts(&self, rows: &JsonRows) -> Result<PromptFile, DataError> {
        PromptFile::read(rows, ChatFormat::default())
            .map_err(|source| DataError::Prompts { file: self.name.clone(), source })
    }
}

/// Examples or prompts, and the rows they were read from.
pub(super) enum ReadData {
    Examples(ExampleFile, ShapedRows),
    Prompts(PromptFile, ShapedRows),
}

impl ReadData {
    pub(super) fn shaped_rows(&self) -> &ShapedRows {
        match self {
            Self::Examples(_, shaped) | Self::Prompts(_, shaped) => shaped,
        }
    }

    pub(super) fn build_statistics(&self, file: &str) -> (DataFile, Vec<String>) {
        let (mut statistics, mut warnings, purpose) = match self {
            Self::Examples(examples, _) => {
                let statistics = statistics::example_statistics("", file, examples);
                (statistics, Vec::new(), DataPurpose::Examples)
            }
            Self::Prompts(prompts, _) => {
                let repeats = statistics::duplicates_warning(file, prompts);
                let statistics = statistics::prompt_statistics("", file, prompts);
                (statistics, repeats.into_iter().collect(), DataPurpose::Prompts)
            }
        };
        let shapes = &self.shaped_rows().shapes;
        add_shapes(&mut statistics, shapes);
        warnings.extend(shape_warnings(file, shapes, purpose));
        (statistics, warnings)
    }
}

/// Reads rows for a purpose. Without one, rows with completions are examples, and others prompts.
pub(super) fn read_data(
    named: &NamedRows,
    purpose: Option<DataPurpose>,
    manner: ChatFormat<'_>,
) -> Result<ReadData, DataError> {
    let file = || named.name.clone();
    if purpose != Some(DataPurpose::Prompts) {
        let shaped = named.shape_for(DataPurpose::Examples)?;
        let is_foreign = [RowShape::Alpaca, RowShape::ShareGpt, RowShape::Preference]
            .iter()
            .any(|shape| shaped.shapes.contains_key(shape));
        let examples = ExampleFile::read(&shaped.rows, manner);
        let has_completions = |examples: &ExampleFile| {
            let fields = &examples.field_counts;
            let is_named = ["completion", "response"].iter().any(|it| fields.contains_key(*it));
            is_named || fields.contains_key("messages")
        };
        match examples {
            Ok(examples) if purpose.is_some() || has_completions(&examples) => {
                return Ok(ReadData::Examples(examples, shaped));
            }
            Err(source) if purpose.is_some() || is_foreign => {
                return Err(DataError::Examples { file: file(), source });
            }
            _ => {}
        }
    }
    let shaped = named.shape_for(DataPurpose::Prompts)?;
    let prompts = PromptFile::read(&shaped.rows, manner)
        .map_err(|source| DataError::Prompts { file: file(), source })?;
    Ok(ReadData::Prompts(prompts, shaped))
}

/// Checks that a file contains examples. Conversations need a base's template, and are checked with
/// the run.
pub fn check_example_file(path: &Path) -> Result<(), DataError> {
    let named = NamedRows::read_file(path)?;
    let rows = named.shape_for(DataPurpose::Examples)?.rows;
    if examples::needs_template(&rows) {
        return Ok(());
    }
    let read = ExampleFile::read(&rows, ChatFormat::default());
    read.map(drop).map_err(|source| DataError::Examples { file: named.name, source })
}

/// Returns examples as engines score them: lines of `prompt` and `completion`. Conversations are
/// rendered with the chat template in a model's directory.
///
/// # Errors
/// A row is no example, or the model has no template for the conversations.
pub async fn prepare_documents(named: &NamedRows, model: &Path) -> Result<Bytes, DataError> {
    let (named, model) = (named.clone(), model.to_owned());
    let prepared = run_blocking(move || {
        let rows = named.shape_for(DataPurpose::Examples)?.rows;
        let template =
            examples::needs_template(&rows).then(|| ChatTemplate::load(&model, jiff::Zoned::now));
        let template = template
            .transpose()
            .map_err(|source| DataError::Template { file: named.name.clone(), source })?;
        let manner = ChatFormat { template: template.as_ref(), ..ChatFormat::default() };
        let read = ExampleFile::read(&rows, manner);
        read.map_err(|source| DataError::Examples { file: named.name.clone(), source })
    });
    Ok(prepared.await?.to_bytes())
}

/// Reads the prompts of a file, which must be texts.
pub fn read_prompt_entries(path: &Path) -> Result<Vec<PromptEntry>, DataError> {
    let named = NamedRows::read_file(path)?;
    let prompts = named.read_prompts(&named.shape_for(DataPurpose::Prompts)?.rows)?;
    Ok(prompts.prompts.into_iter().map(|numbered| numbered.prompt).collect())
}

/// Returns statistics of rows and warnings about them. Conversations are written with their roles.
///
/// # Errors
/// A row is neither an example nor a prompt.
pub fn report_rows(named: &NamedRows) -> Result<(DataFile, Vec<String>), DataError> {
    let template = ChatTemplate::for_readers();
    let manner = ChatFormat { template: Some(&template), ..ChatFormat::default() };
    let (file, warnings) = read_data(named, None, manner)?.build_statistics(&named.name);
    Ok((DataFile { rendered: 0, ..file }, warnings))
}

/// Splits prompts into the part to train on and the held-out part, each with its number of
/// prompts, as a run with the same seed does.
pub fn split_prompt_rows(
    named: &NamedRows,
    held: HeldoutSize,
    seed: u64,
) -> Result<[(Bytes, usize); 2], DataError> {
    let prompts = named.read_prompts(&named.shape_for(DataPurpose::Prompts)?.rows)?;
    let sides = split_prompts(&prompts, held, seed);
    let (train, heldout) =
        sides.map_err(|source| DataError::Split { file: named.name.clone(), source })?;
    Ok([&train, &heldout].map(|side| (side.to_bytes(), side.prompts.len())))
}

/// Returns the prompts without those that ask the same as an earlier one, and the number of
/// removed prompts.
pub fn remove_duplicate_prompts(named: &NamedRows) -> Result<(Bytes, usize), DataError> {
    let shaped = named.shape_for(DataPurpose::Prompts)?.rows;
    let (lines, repeated) = blank_repeated_lines(&shaped.lines);
    let prompts = named.read_prompts(&JsonRows { lines, ..shaped })?;
    let again = find_duplicates(&prompts);
    let places: std::collections::BTreeSet<_> = again.iter().map(|(place, _)| *place).collect();
    let kept = prompts.prompts.iter().filter(|numbered| !places.contains(&numbered.place));
    let kept = PromptFile::from_prompts(kept.cloned().collect()).to_bytes();
    Ok((kept, places.len() + repeated))
}

/// Empties lines that repeat an earlier one, ids included, and returns their number. Other lines
/// keep their numbers.
fn blank_repeated_lines(bytes: &Bytes) -> (Bytes, usize) {
    let (mut seen, mut repeated) = (std::collections::BTreeSet::new(), 0);
    let lines = bytes.split(|byte| *byte == b'\n').map(|line| {
        if seen.insert(line.trim_ascii()) || line.trim_ascii().is_empty() {
            return line;
        }
        repeated += 1;
        &[]
    });
    let lines: Vec<&[u8]> = lines.collect();
    (lines.join(&b'\n').into(), repeated)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_lines_are_removed_and_repeated_ids_are_not() {
        let file = |lines: &[&str]| NamedRows {
            name: "p.jsonl".to_owned(),
            rows: Bytes::from(lines.join("\n")).into(),
            columns: ColumnMapping::new(),
            pinned: None,
        };
        let one = r#"{"id": "a", "prompt": "1+1", "answer": "2"}"#;
        let other = r#"{"id": "a", "prompt": "1+2", "answer": "3"}"#;
        let (kept, removed) = remove_duplicate_prompts(&file(&[one, "", one, "", one])).unwrap();
        assert_eq!((removed, kept.iter().filter(|byte| **byte == b'\n').count()), (2, 1));
        let error = remove_duplicate_prompts(&file(&[one, one, other])).unwrap_err();
        let error = wire::format_error_chain(&error);
        assert!(error.contains("line 3") && error.contains("used in line 1"), "{error}");
    }
}
