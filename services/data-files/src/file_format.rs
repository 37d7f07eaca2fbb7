//! The format of a data file, by its name and its first bytes.

use std::io::Read;

use bytes::Bytes;
use flate2::read::MultiGzDecoder;

use crate::{error::DataFileError, line_writer::DataLimits};

const PARQUET_MAGIC: &[u8] = b"PAR1";
const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const GZIP_ENDING: &str = ".gz";

/// The format of a data file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileFormat {
    JsonLines,
    JsonArray,
    /// With this byte between cells.
    TextTable(u8),
    Parquet,
}

impl FileFormat {
    /// Returns the format of a file that is not compressed.
    pub(crate) fn detect(name: &str, bytes: &[u8]) -> Self {
        let name = name.strip_suffix(GZIP_ENDING).unwrap_or(name);
        let ending = name.rsplit_once('.').map_or(String::new(), |(_, it)| it.to_lowercase());
        let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
        match ending.as_str() {
            _ if bytes.starts_with(PARQUET_MAGIC) => Self::Parquet,
            "parquet" => Self::Parquet,
            "csv" => Self::TextTable(b','),
            "tsv" => Self::TextTable(b'\t'),
            "jsonl" => Self::JsonLines,
            _ if first == Some(&b'[') => Self::JsonArray,
            _ => Self::JsonLines,
        }
    }
}

/// Returns the content of a gzip file; another file is returned as it is.
pub(crate) fn decompress_gzip(bytes: &Bytes, limits: &DataLimits) -> Result<Bytes, DataFileError> {
    if !bytes.starts_with(GZIP_MAGIC) {
        return Ok(bytes.clone());
    }
    let most = limits.text_bytes as u64;
    let mut content = Vec::new();
    let read = MultiGzDecoder::new(bytes.as_ref()).take(most + 1).read_to_end(&mut content);
    read.map_err(|error| DataFileError::Unreadable {
        format: "gzip",
        problem: format!("{error}; copy or compress it again"),
    })?;
    if content.len() as u64 > most {
        return Err(limits.too_many_bytes());
    }
    Ok(content.into())
}
