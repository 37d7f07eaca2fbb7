//! Reads parquet files.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use parquet::{
    basic::Compression,
    errors::ParquetError,
    file::{
        metadata::ParquetMetaData,
        reader::{FileReader, SerializedFileReader},
        serialized_reader::ReadOptionsBuilder,
    },
    record::{Field, Row},
};
use serde_json::{Map, Value};
use wire::RowPlace;

use crate::{
    error::DataFileError,
    line_writer::{DataLimits, LineWriter},
    parquet_pages::check_pages,
    parquet_rows::check_row_sizes,
    parquet_schema::read_schema,
    text_table::COLUMNS_MAX,
};

/// Rows that the reader decodes at once.
const BATCH_ROWS: usize = 64;

pub(crate) fn read_parquet(
    bytes: &Bytes,
    limits: &DataLimits,
    writer: &mut LineWriter,
) -> Result<(), DataFileError> {
    // The library panics on some damaged files.
    let read = catch_unwind(AssertUnwindSafe(|| read_table(bytes, limits, writer)));
    read.unwrap_or_else(|_| Err(unreadable("it is damaged; copy or write it again".to_owned())))
}

fn read_table(
    bytes: &Bytes,
    limits: &DataLimits,
    writer: &mut LineWriter,
) -> Result<(), DataFileError> {
    let options = ReadOptionsBuilder::new().with_parquet_schema(read_schema(bytes)?).build();
    let reader =
        SerializedFileReader::new_with_options(bytes.clone(), options).map_err(|error| {
            let problem = describe_error(&error);
            unreadable(format!("{problem}; it may be incomplete: copy or download it again"))
        })?;
    check_metadata(reader.metadata(), limits)?;
    let repeated = check_pages(bytes, reader.metadata(), limits)?;
    check_row_sizes(&reader, &repeated, limits)?;
    let rows = reader.get_row_iter(None).map_err(|error| unreadable(describe_error(&error)))?;
    for row in rows.with_batch_size(BATCH_ROWS) {
        let place = RowPlace::Row(writer.next_line());
        let row =
            row.map_err(|error| DataFileError::Row { place, problem: describe_error(&error) })?;
        writer.write_row(&row_to_json(row, place)?)?;
    }
    Ok(())
}

/// Returns the library's message without the name of its kind.
fn describe_error(error: &ParquetError) -> String {
    let text = error.to_string();
    text.strip_prefix("Parquet error: ").unwrap_or(&text).to_owned()
}

fn unreadable(problem: String) -> DataFileError {
    DataFileError::Unreadable { format: "parquet", problem }
}

/// Requires a number of rows and columns within the limits, and a compression that can be read.
fn check_metadata(metadata: &ParquetMetaData, limits: &DataLimits) -> Result<(), DataFileError> {
    let groups = metadata.row_groups();
    let rows = groups
        .iter()
        .try_fold(0_u64, |sum, group| sum.checked_add(u64::try_from(group.num_rows()).ok()?));
    limits.check_rows(rows.unwrap_or(u64::MAX))?;
    let columns = metadata.file_metadata().schema_descr().num_columns();
    if columns > COLUMNS_MAX {
        let problem = format!("it has {columns} columns, the limit is {COLUMNS_MAX}");
        return Err(DataFileError::Header { problem });
    }
    let mut chunks = groups.iter().flat_map(|group| group.columns());
    let unknown = chunks.find_map(|chunk| match chunk.compression() {
        Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::ZSTD(_) => None,
        other => Some(other),
    });
    unknown.map_or(Ok(()), |codec| {
        Err(unreadable(format!("it is compressed with {codec}; write it with snappy or zstd")))
    })
}

/// Leaves out empty cells, as if there were no such field.
fn row_to_json(row: Row, place: RowPlace) -> Result<Map<String, Value>, DataFileError> {
    let cells = row.into_columns().into_iter().filter(|(_, cell)| *cell != Field::Null);
    let values = cells.map(|(column, cell)| match field_to_json(cell) {
        Ok(value) => Ok((column, value)),
        Err(problem) => Err(DataFileError::Column { place, column, problem }),
    });
    values.collect()
}

fn field_to_json(field: Field) -> Result<Value, String> {
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(value) => value.into(),
        Field::Byte(value) => value.into(),
        Field::Short(value) => value.into(),
        Field::Int(value) => value.into(),
        Field::Long(value) => value.into(),
        Field::UByte(value) => value.into(),
        Field::UShort(value) => value.into(),
        Field::UInt(value) => value.into(),
        Field::ULong(value) => value.into(),
        Field::Float16(value) => value.to_f32().into(),
        Field::Float(value) => value.into(),
        Field::Double(value) => value.into(),
        Field::Str(text) => text.into(),
        // Some programs do not mark texts as texts.
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => text.into(),
            Err(_) => return Err("its bytes are not UTF-8 text; remove the column".to_owned()),
        },
        Field::Group(row) => {
            let parts = row.into_columns().into_iter();
            let parts = parts.map(|(name, part)| Ok((name, field_to_json(part)?)));
            Value::Object(parts.collect::<Result<_, String>>()?)
        }
        Field::ListInternal(list) => {
            let items = list.elements().iter().cloned().map(field_to_json);
            Value::Array(items.collect::<Result<_, _>>()?)
        }
        Field::MapInternal(map) => {
            let entries = map.entries().iter().cloned().map(|(key, value)| {
                let key = match field_to_json(key)? {
                    Value::String(key) => key,
                    other => other.to_string(),
                };
                Ok((key, field_to_json(value)?))
            });
            Value::Object(entries.collect::<Result<_, String>>()?)
        }
        // Dates, times and decimal numbers, as they are printed.
        other => other.to_string().into(),
    })
}
