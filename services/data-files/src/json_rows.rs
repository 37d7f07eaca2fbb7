//! A data file as JSON lines.

use std::collections::BTreeMap;

use bytes::Bytes;
use wire::{EncodingError, JsonLine, JsonLineError, RowPlace, parse_json_rows};

use crate::{
    columns::{ColumnCounts, ColumnMapping, rename_columns},
    error::DataFileError,
    file_format::{FileFormat, decompress_gzip},
    json_array::read_json_array,
    line_writer::{DataLimits, LineWriter},
    parquet_table::read_parquet,
    row_shape::{DataPurpose, RowShape},
    text_table::read_text_table,
};

/// Programs of Windows write it before a text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The rows of a data file as JSON lines. The number of a line is that of the line or the row in
/// the file, so lines may be blank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonRows {
    pub lines: Bytes,
    /// False for tables and arrays, whose rows are numbered.
    pub has_lines: bool,
}

/// Rows with the fields of prompts and examples.
#[derive(Debug, Clone, PartialEq)]
pub struct ShapedRows {
    pub rows: JsonRows,
    /// Number of rows of each shape.
    pub shapes: BTreeMap<RowShape, u64>,
    /// Number of rows that have each column of the file.
    pub columns: BTreeMap<String, u64>,
}

impl From<Bytes> for JsonRows {
    /// Takes a file of JSON lines as it is.
    fn from(lines: Bytes) -> Self {
        Self { lines, has_lines: true }
    }
}

impl JsonRows {
    /// Reads a file of any format, which its name and its first bytes show. JSON lines stay as they
    /// are, also invalid ones.
    ///
    /// # Errors
    /// The file is damaged, exceeds a limit, or has rows that JSON cannot express.
    pub fn read(name: &str, bytes: &Bytes, limits: &DataLimits) -> Result<Self, DataFileError> {
        let mut bytes = decompress_gzip(bytes, limits)?;
        if bytes.starts_with(BYTE_ORDER_MARK) {
            bytes = bytes.slice(BYTE_ORDER_MARK.len()..);
        }
        let mut writer = LineWriter::new(*limits);
        let has_lines = match FileFormat::detect(name, &bytes) {
            FileFormat::JsonLines => return Ok(bytes.into()),
            FileFormat::TextTable(delimiter) => {
                read_text_table(&bytes, delimiter, &mut writer)?;
                true
            }
            FileFormat::JsonArray => {
                read_json_array(&bytes, &mut writer)?;
                false
            }
            FileFormat::Parquet => {
                read_parquet(&bytes, limits, &mut writer)?;
                false
            }
        };
        Ok(Self { lines: writer.into_text().into(), has_lines })
    }

    /// Joins the parts of one table, whose rows are numbered through.
    ///
    /// # Errors
    /// The parts together exceed a limit.
    pub fn join_parts(
        parts: impl IntoIterator<Item = Self>,
        limits: &DataLimits,
    ) -> Result<Self, DataFileError> {
        let mut writer = LineWriter::new(*limits);
        for part in parts {
            let lines = part.lines.split(|byte| *byte == b'\n');
            lines
                .filter(|line| !line.trim_ascii().is_empty())
                .try_for_each(|it| writer.write_line(it))?;
        }
        Ok(Self { lines: writer.into_text().into(), has_lines: false })
    }

    /// Yields the rows. Blank lines are skipped but counted.
    ///
    /// # Errors
    /// The lines are not UTF-8 text. A line that is not a JSON object is an error item.
    pub fn parse_rows(
        &self,
    ) -> Result<impl Iterator<Item = Result<JsonLine<'_>, JsonLineError>>, EncodingError> {
        let to_place = if self.has_lines { RowPlace::Line } else { RowPlace::Row };
        parse_json_rows(&self.lines, to_place)
    }

    /// Takes fields from the columns that the mapping names, and turns the shapes of other tools
    /// into the fields of prompts or examples. Rows that have these fields stay as they are, and
    /// so do invalid lines, for whose errors the reader of prompts or examples has the words.
    ///
    /// # Errors
    /// A column of the mapping does not exist, or a row of a known shape cannot be used.
    pub fn shape_rows(
        &self,
        mapping: &ColumnMapping,
        purpose: DataPurpose,
        limits: &DataLimits,
    ) -> Result<ShapedRows, DataFileError> {
        let (mut shapes, mut columns) = (BTreeMap::new(), ColumnCounts::default());
        let mut writer = LineWriter::new(*limits);
        let mut is_changed = false;
        for line in self.parse_rows()? {
            let JsonLine { place, text, fields: mut row } = match line {
                Ok(line) => line,
                Err(error) => {
                    self.copy_lines(error.place.number(), &mut writer)?;
                    let rows = self.with_lines(writer);
                    return Ok(ShapedRows { rows, shapes, columns: columns.0 });
                }
            };
            columns.count_row(&row);
            rename_columns(&mut row, mapping);
            let shape = RowShape::recognise(&row);
            shape.into_iter().for_each(|shape| *shapes.entry(shape).or_default() += 1);
            let converted = match shape {
                Some(shape) => shape.convert_row(&mut row, place, purpose)?,
                None => false,
            };
            writer.skip_to_line(place.number())?;
            if converted || !mapping.is_empty() {
                is_changed = true;
                writer.write_row(&row)?;
            } else {
                writer.write_line(text.as_bytes())?;
            }
        }
        columns.check_mapping(mapping)?;
        let rows = if is_changed { self.with_lines(writer) } else { self.clone() };
        Ok(ShapedRows { rows, shapes, columns: columns.0 })
    }

    /// Copies all lines from one on.
    fn copy_lines(&self, first: usize, writer: &mut LineWriter) -> Result<(), DataFileError> {
        writer.skip_to_line(first)?;
        let lines = self.lines.strip_suffix(b"\n").unwrap_or(&self.lines);
        let lines = lines.split(|byte| *byte == b'\n').skip(first - 1);
        lines.into_iter().try_for_each(|line| writer.write_line(line))
    }

    fn with_lines(&self, writer: LineWriter) -> Self {
        Self { lines: writer.into_text().into(), has_lines: self.has_lines }
    }
}

#[cfg(test)]
mod tests;
