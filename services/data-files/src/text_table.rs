//! Reads CSV and TSV files, whose first row names the columns.

use std::collections::BTreeSet;

use csv::{ErrorKind, ReaderBuilder, StringRecord};
use serde_json::{Map, Value};
use wire::RowPlace;

use crate::{error::DataFileError, line_writer::LineWriter};

pub(crate) const COLUMNS_MAX: usize = 1000;

/// Writes each row to the line on which it begins in the file. An empty cell is left out, as if
/// there were no such field, and so is a column without a name: the numbers that pandas writes.
pub(crate) fn read_text_table(
    bytes: &[u8],
    delimiter: u8,
    writer: &mut LineWriter,
) -> Result<(), DataFileError> {
    wire::decode_text(bytes)?;
    let mut reader = ReaderBuilder::new().delimiter(delimiter).from_reader(bytes);
    let header = reader.headers().map_err(|error| table_error(&error, 1))?.clone();
    check_header(&header)?;
    let (mut record, mut counter) = (StringRecord::new(), LineCounter { bytes, at: 0, line: 1 });
    loop {
        let start = usize::try_from(reader.position().byte()).unwrap_or(usize::MAX);
        let line = counter.line_of(start);
        match reader.read_record(&mut record) {
            Ok(false) => return Ok(()),
            Ok(true) => {}
            Err(error) => return Err(table_error(&error, line)),
        }
        let cells = header.iter().zip(&record);
        let cells = cells.filter(|(name, cell)| !name.is_empty() && !cell.is_empty());
        let row: Map<String, Value> =
            cells.map(|(name, cell)| (name.to_owned(), cell.into())).collect();
        writer.skip_to_line(line)?;
        writer.write_row(&row)?;
    }
}

/// Counts lines up to an offset that only grows.
struct LineCounter<'a> {
    bytes: &'a [u8],
    at: usize,
    line: usize,
}

impl LineCounter<'_> {
    /// Returns the line of the first byte from `offset` on that ends no line.
    fn line_of(&mut self, offset: usize) -> usize {
        let rest = self.bytes.get(offset..).unwrap_or_default();
        let blank = rest.iter().take_while(|byte| [b'\r', b'\n'].contains(*byte)).count();
        let to = (offset + blank).min(self.bytes.len());
        let passed = self.bytes.get(self.at..to).unwrap_or_default();
        self.line += passed.iter().filter(|byte| **byte == b'\n').count();
        self.at = to.max(self.at);
        self.line
    }
}

fn check_header(header: &StringRecord) -> Result<(), DataFileError> {
    let wrong = |problem: String| Err(DataFileError::Header { problem });
    if header.len() > COLUMNS_MAX {
        return wrong(format!("it has {} columns, the limit is {COLUMNS_MAX}", header.len()));
    }
    let mut seen = BTreeSet::new();
    for name in header.iter().filter(|name| !name.is_empty()) {
        if !seen.insert(name) {
            return wrong(format!("two columns are called {name:?}; rename one"));
        }
    }
    Ok(())
}

fn table_error(error: &csv::Error, line: usize) -> DataFileError {
    let place = RowPlace::Line(line);
    let problem = match error.kind() {
        ErrorKind::UnequalLengths { expected_len, len, .. } => format!(
            "it has {len} cells and the header {expected_len}; a cell with a comma or a line break \
             needs quotation marks"
        ),
        _ => error.to_string(),
    };
    DataFileError::Row { place, problem }
}
