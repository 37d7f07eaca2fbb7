//! Reads input files with one JSON object per line.

use std::fmt;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::json_count::exceeds_json_values;

/// Values of a row: texts of known data sets have some, token ids up to a few hundred thousand.
pub const ROW_VALUES_MAX: usize = 1_000_000;

/// The place of an object in the file that a user gave, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RowPlace {
    /// A line; blank lines count too.
    Line(usize),
    /// A row of a table or an item of a list, which have no lines of their own.
    Row(usize),
}

impl RowPlace {
    /// Returns the number of the line or the row.
    pub fn number(self) -> usize {
        match self {
            Self::Line(number) | Self::Row(number) => number,
        }
    }
}

impl fmt::Display for RowPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(number) => write!(f, "line {number}"),
            Self::Row(number) => write!(f, "row {number}"),
        }
    }
}

/// A line of an input file with all its fields.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonLine<'a> {
    pub place: RowPlace,
    /// The unchanged text of the line, without its end.
    pub text: &'a str,
    /// The fields of the JSON object.
    pub fields: Map<String, Value>,
}

/// A line that is not a JSON object.
#[derive(Debug, thiserror::Error)]
#[error("{place}: not a JSON object (D101)")]
pub struct JsonLineError {
    pub place: RowPlace,
    #[source]
    pub source: JsonMistake,
}

/// A mistake within a line of JSON.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("column {column}: {reason} (D101)")]
pub struct JsonMistake {
    /// In characters, counted from 1.
    pub column: usize,
    pub reason: String,
}

impl JsonMistake {
    fn too_many_values() -> Self {
        Self { column: 1, reason: format!("more than {ROW_VALUES_MAX} values in one row") }
    }

    fn from_json(line: &str, error: &serde_json::Error) -> Self {
        let column = error.column();
        let (text, place) =
            (error.to_string(), format!(" at line {} column {column}", error.line()));
        let reason = text.strip_suffix(&place).unwrap_or(&text).to_owned();
        // serde_json counts bytes.
        let before = &line.as_bytes()[..column.min(line.len())];
        Self { column: String::from_utf8_lossy(before).chars().count(), reason }
    }
}

/// Bytes that are not UTF-8 text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "line {line}, column {column}: the byte {byte:#04x} is not UTF-8 text; if the file is Latin-1, \
     convert it with `iconv -f LATIN1 -t UTF-8` (D102)"
)]
pub struct EncodingError {
    pub line: usize,
    /// In characters, counted from 1.
    pub column: usize,
    pub byte: u8,
}

/// Returns the bytes as text. Fails at the first byte that is not UTF-8.
pub fn decode_text(bytes: &[u8]) -> Result<&str, EncodingError> {
    std::str::from_utf8(bytes).map_err(|error| {
        let (before, rest) = bytes.split_at(error.valid_up_to());
        let before = String::from_utf8_lossy(before);
        let line = before.rsplit('\n').next().unwrap_or_default();
        EncodingError {
            line: before.matches('\n').count() + 1,
            column: line.chars().count() + 1,
            byte: rest.first().copied().unwrap_or_default(),
        }
    })
}

/// Parses the lines of a file one by one and skips blank ones.
///
/// # Errors
/// Fails if the file is not UTF-8 text. A line that is not a JSON object is an error item of the
/// iterator.
pub fn parse_json_lines(
    text: &[u8],
) -> Result<impl Iterator<Item = Result<JsonLine<'_>, JsonLineError>>, EncodingError> {
    parse_json_rows(text, RowPlace::Line)
}

/// Parses lines as [`parse_json_lines`] does, and names the place of each by the number of its
/// line.
///
/// # Errors
/// As for [`parse_json_lines`].
pub fn parse_json_rows(
    text: &[u8],
    to_place: fn(usize) -> RowPlace,
) -> Result<impl Iterator<Item = Result<JsonLine<'_>, JsonLineError>>, EncodingError> {
    let to_line = |(place, text, fields)| JsonLine { place, text, fields };
    Ok(deserialize_lines(text, to_place)?.map(move |line| line.map(to_line)))
}

/// Yields the place, the text and the value of each line that is not blank.
pub(crate) fn deserialize_lines<'a, T: Deserialize<'a>>(
    text: &'a [u8],
    to_place: fn(usize) -> RowPlace,
) -> Result<impl Iterator<Item = Result<(RowPlace, &'a str, T), JsonLineError>>, EncodingError> {
    let lines = decode_text(text)?.lines().enumerate();
    Ok(lines.filter(|(_, text)| !text.trim().is_empty()).map(move |(index, text)| {
        let place = to_place(index + 1);
        if exceeds_json_values(text.as_bytes(), ROW_VALUES_MAX) {
            return Err(JsonLineError { place, source: JsonMistake::too_many_values() });
        }
        let value = serde_json::from_str(text);
        value.map(|value| (place, text, value)).map_err(|error: serde_json::Error| JsonLineError {
            place,
            source: JsonMistake::from_json(text, &error),
        })
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_is_named_by_line_and_column() {
        let text = "{\"a\": 1}\n\n{\"ä\": oops}\n";
        let mut lines = parse_json_lines(text.as_bytes()).unwrap();
        assert_eq!(lines.next().unwrap().unwrap().place, RowPlace::Line(1));
        let error = lines.next().unwrap().unwrap_err();
        assert_eq!(
            (error.place, error.source.to_string()),
            (RowPlace::Line(3), "column 7: expected value (D101)".into())
        );
    }

    #[test]
    fn a_line_with_countless_values_is_refused_before_it_is_parsed() {
        let line = |items: usize| format!("{{\"a\": [{}0]}}", "0,".repeat(items));
        let parse = |text: &str| parse_json_lines(text.as_bytes()).unwrap().next().unwrap().err();
        assert!(parse(&line(1000)).is_none());
        let error = parse(&line(ROW_VALUES_MAX + 1)).unwrap().source.to_string();
        assert!(error.contains("more than 1000000 values"), "{error}");
    }

    #[test]
    fn a_byte_that_is_no_text_is_named_by_line_and_column() {
        let error = decode_text("été\nça caf\u{e9}".as_bytes()).map(str::len);
        assert_eq!(error, Ok(15));
        let error = decode_text(b"\xc3\xa9t\xc3\xa9\n\xc3\xa7a caf\xe9\n").unwrap_err();
        assert_eq!(error, EncodingError { line: 2, column: 7, byte: 0xe9 });
    }
}
