//! Pairs from JSON lines.

use std::io::{self, BufRead};

use serde::Deserialize;

use crate::{Comparison, Pair, PairedTest};

/// Maximum number of lines of a file of pairs.
const PAIRS_MAX: usize = 10_000_000;

/// A line that is not a pair of scores.
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

/// The reason why lines of pairs cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum PairsError {
    /// A line cannot be read.
    #[error("line {line}")]
    Read {
        /// From 1.
        line: usize,
        /// The reason.
        source: io::Error,
    },
    /// A line is not a pair.
    #[error("line {line}")]
    Line {
        /// From 1.
        line: usize,
        /// The reason.
        source: PairLineError,
    },
    /// There are too many.
    #[error("more than {PAIRS_MAX} pairs (D105)")]
    TooMany,
    /// There are none.
    #[error("no pairs (D102)")]
    Empty,
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

/// Tests the pairs in lines, and skips empty lines. Returns the comparison, and the number
/// of pairs.
///
/// # Errors
/// A line is not a pair, or there are none or too many.
pub fn compare_pair_lines(
    mut test: PairedTest,
    lines: impl BufRead,
) -> Result<(Comparison, usize), PairsError> {
    let mut pairs = 0;
    for (index, text) in lines.lines().enumerate() {
        let line = index + 1;
        let text = text.map_err(|source| PairsError::Read { line, source })?;
        if text.trim().is_empty() {
            continue;
        }
        let pair = read_pair_line(&text).map_err(|source| PairsError::Line { line, source })?;
        test.add_pair(pair);
        pairs += 1;
        if pairs > PAIRS_MAX {
            return Err(PairsError::TooMany);
        }
    }
    if pairs == 0 { Err(PairsError::Empty) } else { Ok((test.comparison(), pairs)) }
}
