//! Pairs from JSON lines.

use serde::Deserialize;

use crate::Pair;

/// A line that is no pair of scores.
#[derive(Debug, thiserror::Error)]
pub enum PairLineError {
    /// The line is not an object with the numbers `a` and `b`.
    #[error("not a pair of scores: {0}; write a line as {{\"a\": 0.5, \"b\": 1}} (D101)")]
    NotAPair(#[from] serde_json::Error),
    /// A score lies outside of 0 to 1.
    #[error("{field} is {value}; scores lie between 0 and 1 (D101)")]
    OutOfRange {
        /// `a` or `b`.
        field: &'static str,
        /// The score.
        value: f64,
    },
}

/// Reads a line such as `{"a": 0.5, "b": 1}`; other keys are ignored.
///
/// # Errors
/// The line is not such an object, or a score is not between 0 and 1.
pub fn read_pair_line(line: &str) -> Result<Pair, PairLineError> {
    #[derive(Deserialize)]
    struct Line {
        a: f64,
        b: f64,
    }

    let Line { a, b } = serde_json::from_str(line)?;
    for (field, value) in [("a", a), ("b", b)] {
        if !(0.0..=1.0).contains(&value) {
            return Err(PairLineError::OutOfRange { field, value });
        }
    }
    Ok(Pair { a, b })
}
