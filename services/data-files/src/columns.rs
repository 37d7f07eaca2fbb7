//! Takes the fields of prompts and examples from columns with other names.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use crate::error::DataFileError;

/// Columns that an error lists.
const LISTED_COLUMNS_MAX: usize = 30;
/// Columns that are remembered of a file of JSON lines, whose rows may all differ.
const KNOWN_COLUMNS_MAX: usize = 1000;

/// The names of columns, by the field that is taken from each.
pub type ColumnMapping = BTreeMap<String, String>;

/// The columns of a file: the number of rows that have each.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ColumnCounts(pub(crate) BTreeMap<String, u64>);

impl ColumnCounts {
    pub(crate) fn count_row(&mut self, row: &Map<String, Value>) {
        for (name, _) in row.iter().filter(|(_, value)| !value.is_null()) {
            if let Some(count) = self.0.get_mut(name) {
                *count += 1;
            } else if self.0.len() < KNOWN_COLUMNS_MAX {
                self.0.insert(name.clone(), 1);
            }
        }
    }

    /// Requires that a row has each column of the mapping.
    pub(crate) fn check_mapping(&self, mapping: &ColumnMapping) -> Result<(), DataFileError> {
        let missing = mapping.iter().find(|(_, column)| !self.0.contains_key(*column));
        let Some((field, column)) = missing else { return Ok(()) };
        let listed = self.0.keys().take(LISTED_COLUMNS_MAX).map(|name| format!("{name:?}"));
        let mut columns = listed.collect::<Vec<_>>().join(", ");
        if self.0.len() > LISTED_COLUMNS_MAX {
            columns.push_str(&format!(" and {} more", self.0.len() - LISTED_COLUMNS_MAX));
        }
        let (field, column) = (field.clone(), column.clone());
        Err(DataFileError::UnknownColumn { field, column, columns })
    }
}

/// Renames the columns of a row. A field that the row has beside the mapped column is replaced.
pub(crate) fn rename_columns(row: &mut Map<String, Value>, mapping: &ColumnMapping) {
    let taken: Vec<(&String, Value)> = mapping
        .iter()
        .filter_map(|(field, column)| Some((field, row.get(column)?.clone())))
        .collect();
    let sources: BTreeSet<&String> = mapping.values().collect();
    sources.into_iter().for_each(|column| drop(row.remove(column)));
    mapping.keys().for_each(|field| drop(row.remove(field)));
    taken.into_iter().for_each(|(field, value)| drop(row.insert(field.clone(), value)));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn mapping(pairs: &[(&str, &str)]) -> ColumnMapping {
        pairs.iter().map(|(field, column)| ((*field).into(), (*column).into())).collect()
    }

    #[test]
    fn fields_are_taken_from_the_columns_that_are_named() {
        let rename = |mut row: Value, pairs: &[(&str, &str)]| {
            rename_columns(row.as_object_mut().unwrap(), &mapping(pairs));
            row
        };
        let row = json!({"question": "1+1", "solution": "2", "answer": "two", "level": 1});
        let renamed = rename(row, &[("prompt", "question"), ("answer", "solution")]);
        assert_eq!(renamed, json!({"prompt": "1+1", "answer": "2", "level": 1}));
        let swapped = rename(json!({"a": 1, "b": 2}), &[("a", "b"), ("b", "a")]);
        assert_eq!(swapped, json!({"a": 2, "b": 1}));
        let both = rename(json!({"q": 1}), &[("prompt", "q"), ("id", "q")]);
        assert_eq!(both, json!({"prompt": 1, "id": 1}));
    }

    #[test]
    fn an_unknown_column_is_refused_with_those_that_there_are() {
        let mut counts = ColumnCounts::default();
        counts.count_row(json!({"question": "a", "level": null}).as_object().unwrap());
        counts.check_mapping(&mapping(&[("prompt", "question")])).unwrap();
        for column in ["Question", "level"] {
            let error = counts.check_mapping(&mapping(&[("prompt", column)])).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(&format!("{column:?}, which `columns` takes as")), "{error}");
            assert!(error.ends_with("the columns are \"question\" (D112)"), "{error}");
        }
    }
}
