//! The rows of a file, with the fields of prompts or examples.

use std::collections::BTreeMap;

use bytes::Bytes;
use data_files::{ColumnMapping, DataLimits, DataPurpose, JsonRows, RowShape, ShapedRows};
use spec::HUB_PREFIX;
use wire::v1::DataFile;

use super::{error::DataError, file_content::read_spec_file};
use crate::{SpecFiles, SubmitError, base_model::run_blocking};

/// Reads a file that a user named. The content of a data set is JSON lines already.
pub(crate) fn read_rows(name: &str, content: &Bytes) -> Result<JsonRows, DataError> {
    if name.starts_with(HUB_PREFIX) {
        return Ok(JsonRows { lines: content.clone(), has_lines: false });
    }
    let rows = JsonRows::read(name, content, &DataLimits::default());
    rows.map_err(|source| DataError::Rows { file: name.to_owned(), source })
}

pub(crate) fn shape_rows(
    name: &str,
    rows: &JsonRows,
    columns: &ColumnMapping,
    purpose: DataPurpose,
) -> Result<ShapedRows, DataError> {
    let shaped = rows.shape_rows(columns, purpose, &DataLimits::default());
    shaped.map_err(|source| DataError::Rows { file: name.to_owned(), source })
}

/// Reads the file that a field of a spec names.
pub(crate) async fn read_spec_rows(
    field: &str,
    file: &str,
    files: &SpecFiles,
    (columns, purpose): (&ColumnMapping, DataPurpose),
) -> Result<ShapedRows, SubmitError> {
    let content = read_spec_file(field, file, files).await?;
    let (name, columns) = (file.to_owned(), columns.clone());
    let shaped =
        run_blocking(move || shape_rows(&name, &read_rows(&name, &content)?, &columns, purpose));
    shaped.await.map_err(|source| SubmitError::data_error(field, source))
}

/// Names the shapes of a file in its statistics.
pub(crate) fn add_shapes(statistics: &mut DataFile, shapes: &BTreeMap<RowShape, u64>) {
    statistics.shapes = shapes.keys().map(|shape| shape.as_str().to_owned()).collect();
}

/// Warns about rows of several shapes, and about pairs of which one answer is not used.
pub(crate) fn shape_warnings(
    file: &str,
    shapes: &BTreeMap<RowShape, u64>,
    purpose: DataPurpose,
) -> Vec<String> {
    let foreign = [RowShape::Alpaca, RowShape::ShareGpt, RowShape::Preference];
    let is_mixed = shapes.len() > 1 && foreign.iter().any(|shape| shapes.contains_key(shape));
    let mixed = is_mixed.then(|| {
        let each = shapes.iter().map(|(shape, count)| format!("{} ({count})", shape.as_str()));
        let each = each.collect::<Vec<_>>().join(", ");
        format!("{file}: its rows have several shapes: {each}")
    });
    let pairs = shapes.get(&RowShape::Preference).filter(|_| purpose == DataPurpose::Examples);
    let unused = pairs.map(|count| {
        format!(
            "{file}: {count} rows are pairs; their chosen answers are learned, and the rejected \
             ones are not used: objectives learn from the samples of a run, not from given pairs"
        )
    });
    mixed.into_iter().chain(unused).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixed_shapes_and_unused_answers_are_reported() {
        let warn = |shapes: &[(RowShape, u64)], purpose| {
            shape_warnings("f", &shapes.iter().copied().collect(), purpose)
        };
        let own = [(RowShape::Prompt, 1), (RowShape::Text, 2)];
        assert!(warn(&own, DataPurpose::Prompts).is_empty());
        let pairs = [(RowShape::Alpaca, 1), (RowShape::Preference, 2)];
        let warnings = warn(&pairs, DataPurpose::Examples);
        assert!(warnings[0].ends_with("alpaca (1), prompt/chosen/rejected (2)"), "{warnings:?}");
        assert!(warnings[1].starts_with("f: 2 rows are pairs; their chosen answers are learned"));
        assert_eq!(warn(&pairs[1..], DataPurpose::Prompts), [""; 0]);
    }

    #[test]
    fn an_error_names_file_row_and_column() {
        let read = |name: &str, content: &'static str| {
            let rows = read_rows(name, &Bytes::from_static(content.as_bytes())).unwrap();
            let shaped =
                shape_rows(name, &rows, &ColumnMapping::new(), DataPurpose::Examples).unwrap_err();
            wire::format_error_chain(&shaped)
        };
        let error = read("a.json", r#"[{"instruction": "a", "output": "b"}, {"instruction": 1}]"#);
        assert_eq!(error, "a.json: row 2, column \"instruction\": must be a text (D111)");
        let error = read("a.csv", "chosen,rejected\n\"a\nb\",c\n");
        assert!(error.starts_with("a.csv: line 2, column \"chosen\": needs"), "{error}");
        let error = read("hub:o/n", "\n{\"conversations\": 1}\n");
        assert!(error.starts_with("hub:o/n: row 2, column \"conversations\""), "{error}");
    }
}
