//! The reasons why a spec cannot be used.

use std::fmt;

use crate::source_map::{SourceMap, SourcePlace};

/// A field whose value cannot work, and advice how to correct it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("field {field}: {remedy} (R103)")]
pub struct FieldError {
    /// Path such as `evals[0].name`.
    pub field: String,
    /// Advice in words that follow the field's path.
    pub remedy: String,
}

/// The reason why a spec cannot be read, with the line that it is about.
///
/// ```text
/// line 7, column 11: raft.cycles: must be from 0 to 10000, not -1 (R103)
/// 7 │   cycles: -1
///   │           ^
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecError {
    message: String,
    code: SpecErrorCode,
    line: Option<SourceLine>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpecErrorCode {
    /// The YAML has another form than a spec.
    Unreadable,
    /// A value cannot work.
    InvalidField,
}

/// A line of a document with the place of an error.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SourceLine {
    place: SourcePlace,
    text: String,
}

/// The longest line that is shown, in characters.
const LINE_MAX: usize = 100;

impl SpecError {
    pub(crate) fn new(
        yaml: &str,
        code: SpecErrorCode,
        message: String,
        place: Option<SourcePlace>,
    ) -> Self {
        let line = place.and_then(|place| {
            let text = yaml.lines().nth(place.line.checked_sub(1)?)?;
            Some(SourceLine { place, text: text.to_owned() })
        });
        Self { message, code, line }
    }

    /// Returns the message without its place.
    pub(crate) fn plain_message(&self) -> &str {
        &self.message
    }

    /// Adds the line of the field to an error about its value, if the field is in the document.
    pub fn from_field(yaml: &str, error: &FieldError) -> Self {
        let FieldError { field, remedy } = error;
        let map = SourceMap::read(yaml);
        let unset = map.find_unset_key(field).map(|key| format!("; {key} has no value"));
        let message = format!("{field}: {remedy}{}", unset.unwrap_or_default());
        // The document itself has an empty path.
        let path = if field == "spec" { "" } else { field };
        Self::new(yaml, SpecErrorCode::InvalidField, message, map.find_field(path))
    }

    /// Removes the line, of a document that the user has not written.
    pub(crate) fn without_place(self) -> Self {
        Self { line: None, ..self }
    }
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = match self.code {
            SpecErrorCode::Unreadable => "R102",
            SpecErrorCode::InvalidField => "R103",
        };
        let message = &self.message;
        let Some(SourceLine { place, text }) = &self.line else {
            return write!(f, "{message} ({code})");
        };
        let SourcePlace { line, column, width } = place;
        write!(f, "line {line}, column {column}: {message} ({code})")?;
        // Far into a long line, only the place itself would not be shown.
        if *column > LINE_MAX {
            return Ok(());
        }
        let shown: String = text.chars().take(LINE_MAX).collect();
        let cut = if shown.len() < text.len() { "…" } else { "" };
        let margin = " ".repeat(line.to_string().len());
        // A tab stays one, so that the mark stands below it.
        let indent: String = text
            .chars()
            .take(column.saturating_sub(1))
            .map(|sign| if sign == '\t' { '\t' } else { ' ' })
            .collect();
        let marks = "^".repeat((*width).min(LINE_MAX.saturating_sub(*column) + 1));
        write!(f, "\n{line} │ {shown}{cut}\n{margin} │ {indent}{marks}")
    }
}

impl std::error::Error for SpecError {}
