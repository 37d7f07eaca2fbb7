//! Reads input files with one JSON object per line.

use serde::Deserialize;
use serde_json::{Map, Value};

/// A line of an input file with all its fields.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonLine<'a> {
    /// Line number, counted from 1 and including blank lines.
    pub number: usize,
    /// The unchanged text of the line, without its end.
    pub text: &'a str,
    /// The fields of the JSON object.
    pub fields: Map<String, Value>,
}

/// A line that is not a JSON object.
#[derive(Debug, thiserror::Error)]
#[error("line {number}: not a JSON object (D101)")]
pub struct JsonLineError {
    pub number: usize,
    #[source]
    pub source: serde_json::Error,
}

/// Parses the lines of a file one by one and skips blank ones.
///
/// # Errors
/// Fails if the file is not UTF-8 text. A line that is not a JSON object is an error item of the
/// iterator.
pub fn parse_json_lines(
    text: &[u8],
) -> Result<impl Iterator<Item = Result<JsonLine<'_>, JsonLineError>>, std::str::Utf8Error> {
    let to_line = |(number, text, fields)| JsonLine { number, text, fields };
    Ok(deserialize_lines(text)?.map(move |line| line.map(to_line)))
}

/// Yields the number, the text and the value of each line that is not blank.
pub(crate) fn deserialize_lines<'a, T: Deserialize<'a>>(
    text: &'a [u8],
) -> Result<impl Iterator<Item = Result<(usize, &'a str, T), JsonLineError>>, std::str::Utf8Error> {
    let lines = std::str::from_utf8(text)?.lines().enumerate();
    Ok(lines.filter(|(_, text)| !text.trim().is_empty()).map(|(index, text)| {
        let number = index + 1;
        let value = serde_json::from_str(text);
        value.map(|value| (number, text, value)).map_err(|source| JsonLineError { number, source })
    }))
}
