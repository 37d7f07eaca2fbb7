//! The data that a spec names: files, data sets of the hub, and feedback.

use std::{collections::BTreeMap, path::Path};

use schemars::{Schema, SchemaGenerator, json_schema};

use crate::field_checks::{FieldResult, ensure_field};

/// Begins the name of a file of prompts or examples that stands for the feedback on a channel.
pub const FEEDBACK_PREFIX: &str = "feedback:";

/// Begins the name of a data set of the hub, such as `hub:org/name:train`.
pub const HUB_PREFIX: &str = "hub:";

const MAPPED_COLUMNS_MAX: usize = 64;
/// The endings of files with rows; `.gz` may follow. Other files are plain texts.
const ROW_FILE_ENDINGS: [&str; 5] = ["jsonl", "json", "csv", "tsv", "parquet"];

/// Returns true if a name stands for rows of examples, and false if it is that of a plain text.
pub fn names_rows(name: &str) -> bool {
    let path = name.strip_suffix(".gz").unwrap_or(name);
    let ending = Path::new(path).extension().unwrap_or_default().to_ascii_lowercase();
    name.starts_with(HUB_PREFIX)
        || name.starts_with(FEEDBACK_PREFIX)
        || ROW_FILE_ENDINGS.iter().any(|known| ending == *known)
}

pub(crate) fn check_columns(field: &str, columns: &BTreeMap<String, String>) -> FieldResult {
    let given = columns.len();
    let remedy = format!("names {given} columns, the limit is {MAPPED_COLUMNS_MAX}");
    ensure_field(given <= MAPPED_COLUMNS_MAX, field, remedy)?;
    let empty = columns.iter().any(|(name, column)| name.is_empty() || column.is_empty());
    let remedy = "must have the name of a field and of a column, as in {prompt: question}";
    ensure_field(!empty, field, remedy)
}

/// Describes the mappings that [`check_columns`] accepts.
pub(crate) fn columns_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": MAPPED_COLUMNS_MAX,
        "propertyNames": { "minLength": 1 },
        "additionalProperties": { "type": "string", "minLength": 1 },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_plain_texts_are_told_apart_by_name() {
        for rows in ["a.jsonl", "a.CSV", "b/a.parquet", "a.json.gz", "hub:org/name:test"] {
            assert!(names_rows(rows), "{rows}");
        }
        for text in ["a.txt", "a", "a.txt.gz", "jsonl", "b.jsonl/a"] {
            assert!(!names_rows(text), "{text}");
        }
    }

    #[test]
    fn a_column_has_a_name() {
        let columns = |field: &str, column: &str| BTreeMap::from([(field.into(), column.into())]);
        check_columns("raft.columns", &columns("prompt", "question")).unwrap();
        for (field, column) in [("", "a"), ("prompt", "")] {
            let error = check_columns("raft.columns", &columns(field, column)).unwrap_err();
            assert!(error.to_string().contains("{prompt: question}"), "{error}");
        }
    }
}
