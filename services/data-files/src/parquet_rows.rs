//! Bounds the texts of single rows of a parquet file. The lists of a row may repeat one long text of
//! a dictionary, so that a few bytes become any number.

use bytes::Bytes;
use parquet::{
    column::reader::{ColumnReader, ColumnReaderImpl},
    data_type::{ByteArray, DataType},
    errors::ParquetError,
    file::reader::{FileReader, SerializedFileReader},
};

use crate::{error::DataFileError, line_writer::DataLimits, parquet_pages::RepeatedTexts};

/// Rows that are decoded at once. Texts of a dictionary are not copied.
const BATCH_ROWS: usize = 64;

/// Requires that the texts in these columns stay within the limit of the whole text, in each row.
pub(crate) fn check_row_sizes(
    reader: &SerializedFileReader<Bytes>,
    columns: &[RepeatedTexts],
    limits: &DataLimits,
) -> Result<(), DataFileError> {
    for texts in columns.chunk_by(|a, b| a.group == b.group) {
        let Some(RepeatedTexts { group, .. }) = texts.first().copied() else { continue };
        let mut row_bytes = Vec::new();
        for RepeatedTexts { column, .. } in texts {
            add_row_bytes(reader, group, *column, &mut row_bytes).map_err(|error| {
                DataFileError::Unreadable { format: "parquet", problem: error.to_string() }
            })?;
        }
        let limit = limits.text_bytes as u64;
        if let Some(row) = row_bytes.iter().position(|bytes| *bytes > limit) {
            let problem = format!("row {} has more than {limit} bytes of text", row + 1);
            return Err(DataFileError::RowGroup { group, problem });
        }
    }
    Ok(())
}

fn add_row_bytes(
    reader: &SerializedFileReader<Bytes>,
    group: usize,
    column: usize,
    row_bytes: &mut Vec<u64>,
) -> Result<(), ParquetError> {
    let full = reader.metadata().row_group(group).column(column).column_descr().max_def_level();
    match reader.get_row_group(group)?.get_column_reader(column)? {
        ColumnReader::ByteArrayColumnReader(texts) => {
            add_text_bytes(texts, full, ByteArray::len, row_bytes)
        }
        ColumnReader::FixedLenByteArrayColumnReader(texts) => {
            add_text_bytes(texts, full, |text| text.len(), row_bytes)
        }
        _ => Ok(()),
    }
}

/// Adds the lengths of a column's texts to those of their rows. Values below the definition level
/// `full` are absent.
fn add_text_bytes<T: DataType>(
    mut texts: ColumnReaderImpl<T>,
    full: i16,
    length: impl Fn(&T::T) -> usize,
    row_bytes: &mut Vec<u64>,
) -> Result<(), ParquetError> {
    let (mut values, mut definitions, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
    let mut rows = 0;
    loop {
        values.clear();
        definitions.clear();
        repetitions.clear();
        let read = texts.read_records(
            BATCH_ROWS,
            Some(&mut definitions),
            Some(&mut repetitions),
            &mut values,
        );
        if read?.0 == 0 {
            return Ok(());
        }
        let mut lengths = values.iter().map(&length);
        for (definition, repetition) in definitions.iter().zip(&repetitions) {
            rows += usize::from(*repetition == 0);
            if row_bytes.len() < rows {
                row_bytes.push(0);
            }
            let bytes = if *definition == full { lengths.next().unwrap_or(0) } else { 0 };
            if let Some(sum) = row_bytes.get_mut(rows.saturating_sub(1)) {
                *sum = sum.saturating_add(bytes as u64);
            }
        }
    }
}
