//! Reads the files that people have data in: JSON lines, a JSON array, CSV and parquet, each also
//! compressed with gzip. [`JsonRows::read`] turns a file into JSON lines, and
//! [`JsonRows::shape_rows`] renames columns and turns the shapes of other tools into the fields of
//! prompts and examples. Knows neither files nor networks: callers have the bytes.

mod columns;
mod error;
mod file_format;
mod json_array;
mod json_rows;
mod line_writer;
mod parquet_pages;
mod parquet_rows;
mod parquet_schema;
mod parquet_table;
mod row_shape;
mod text_table;
mod thrift;

pub use columns::ColumnMapping;
pub use error::DataFileError;

pub use json_rows::{JsonRows, ShapedRows};
pub use line_writer::DataLimits;
pub use row_shape::{DataPurpose, RowShape};
