//! Rows as JSON lines, within bounds.

use serde_json::{Map, Value};

use crate::error::DataFileError;

/// The bounds of what is read from one file.
#[derive(Debug, Clone, Copy)]
pub struct DataLimits {
    /// Bytes of the rows as JSON lines, of a gzip file's content, and of the pages of a parquet
    /// file, decompressed.
    pub text_bytes: usize,
    pub rows: usize,
    /// Bytes of one page of a parquet file, decompressed.
    pub page_bytes: usize,
    /// Values in a parquet file, the items of lists included.
    pub values: u64,
    /// Items that the lists of a row of a parquet file may have. Those of all rows of a row group
    /// count, without one for each row and column.
    pub list_items: u64,
}

impl Default for DataLimits {
    fn default() -> Self {
        Self {
            text_bytes: 1 << 30,
            rows: 10_000_000,
            page_bytes: 256 << 20,
            values: 100_000_000,
            list_items: 20_000_000,
        }
    }
}

impl DataLimits {
    pub(crate) fn too_many_bytes(&self) -> DataFileError {
        DataFileError::TooLarge { limit: self.text_bytes as u64, unit: "bytes of text" }
    }

    pub(crate) fn check_rows(&self, rows: u64) -> Result<(), DataFileError> {
        let limit = self.rows as u64;
        if rows > limit {
            return Err(DataFileError::TooLarge { limit, unit: "rows" });
        }
        Ok(())
    }
}

/// JSON lines that are being written.
pub(crate) struct LineWriter {
    limits: DataLimits,
    text: Vec<u8>,
    /// Number of lines, blank ones included.
    lines: usize,
}

impl LineWriter {
    pub(crate) fn new(limits: DataLimits) -> Self {
        Self { limits, text: Vec::new(), lines: 0 }
    }

    /// Returns the number of the next line, counted from 1.
    pub(crate) fn next_line(&self) -> usize {
        self.lines + 1
    }

    /// Writes blank lines until the next line has this number.
    pub(crate) fn skip_to_line(&mut self, line: usize) -> Result<(), DataFileError> {
        while self.next_line() < line {
            self.write_line(&[])?;
        }
        Ok(())
    }

    pub(crate) fn write_row(&mut self, row: &Map<String, Value>) -> Result<(), DataFileError> {
        let line = serde_json::to_vec(row).expect("a map of JSON values is JSON");
        self.write_line(&line)
    }

    pub(crate) fn write_line(&mut self, line: &[u8]) -> Result<(), DataFileError> {
        self.limits.check_rows(self.next_line() as u64)?;
        if self.text.len() + line.len() + 1 > self.limits.text_bytes {
            return Err(self.limits.too_many_bytes());
        }
        self.text.extend_from_slice(line);
        self.text.push(b'\n');
        self.lines += 1;
        Ok(())
    }

    pub(crate) fn into_text(self) -> Vec<u8> {
        self.text
    }
}
