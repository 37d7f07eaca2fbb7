//! Input files: one JSON object a line.

use serde_json::{Map, Value};

/// One line of an input file, with every field it has.
#[derive(Debug, Clone, PartialEq)]
pub struct Line<'a> {
    /// Counted from 1, blank lines too.
    pub number: usize,
    /// As it stands in the file.
    pub text: &'a str,
    pub fields: Map<String, Value>,
}

/// A line that holds no JSON object.
#[derive(Debug, thiserror::Error)]
#[error("line {number}: not a JSON object (D101)")]
pub struct BadLine {
    pub number: usize,
    #[source]
    pub source: serde_json::Error,
}

/// The lines of a file that are not blank.
///
/// # Errors
/// When it is not UTF-8 text.
pub fn lines(
    text: &[u8],
) -> Result<impl Iterator<Item = Result<Line<'_>, BadLine>>, std::str::Utf8Error> {
    let lines = std::str::from_utf8(text)?.lines().enumerate();
    Ok(lines.filter(|(_, text)| !text.trim().is_empty()).map(|(index, text)| {
        let number = index + 1;
        let read = serde_json::from_str(text);
        read.map(|fields| Line { number, text, fields })
            .map_err(|source| BadLine { number, source })
    }))
}
