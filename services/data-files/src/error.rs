//! The reasons why a data file cannot be read.

use wire::{EncodingError, RowPlace};

/// The reason why a data file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum DataFileError {
    #[error("it has more than {limit} {unit}, which is the limit; split it (D105)")]
    TooLarge { limit: u64, unit: &'static str },
    #[error(transparent)]
    Encoding(#[from] EncodingError),
    #[error("{place}: {problem} (D111)")]
    Row { place: RowPlace, problem: String },
    #[error("{place}, column {column:?}: {problem} (D111)")]
    Column { place: RowPlace, column: String, problem: String },
    #[error("row group {group}: {problem}; write the table in smaller row groups (D105)")]
    RowGroup { group: usize, problem: String },
    #[error("the header: {problem} (D111)")]
    Header { problem: String },
    #[error("it cannot be read as {format}: {problem} (D111)")]
    Unreadable { format: &'static str, problem: String },
    #[error(
        "no row has a column {column:?}, which `columns` takes as {field:?}; the columns are \
         {columns} (D112)"
    )]
    UnknownColumn { field: String, column: String, columns: String },
}
