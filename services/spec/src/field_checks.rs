//! The checks that sections apply to their fields.

use regex::RegexBuilder;

use crate::error::FieldError;

/// A larger expression takes too much memory to compile.
const PATTERN_BYTES_MAX: usize = 4096;

/// Compiled size of an expression for `extract`.
pub(crate) const EXTRACT_COMPILED_MAX: usize = 10 << 20;

pub(crate) type FieldResult = Result<(), FieldError>;

pub(crate) fn ensure_field(holds: bool, field: &str, remedy: impl Into<String>) -> FieldResult {
    if holds { Ok(()) } else { Err(FieldError { field: field.into(), remedy: remedy.into() }) }
}

/// Requires a finite value from `low` to `high`, both included.
pub(crate) fn check_range(field: &str, value: f64, low: f64, high: f64) -> FieldResult {
    ensure_field(
        value.is_finite() && (low..=high).contains(&value),
        field,
        format!("must be from {} to {}, not {value}", write_bound(low), write_bound(high)),
    )
}

/// Writes small numbers as people do: `1e-12`.
fn write_bound(bound: f64) -> String {
    if bound != 0.0 && bound.abs() < 1e-4 { format!("{bound:e}") } else { bound.to_string() }
}

/// Requires a count from `low` to `high`, both included.
pub(crate) fn check_count(field: &str, value: u32, low: u32, high: u32) -> FieldResult {
    check_range(field, f64::from(value), f64::from(low), f64::from(high))
}

/// Requires a valid expression with a compiled size of at most `compiled_max` bytes.
pub(crate) fn check_pattern(field: &str, pattern: &str, compiled_max: usize) -> FieldResult {
    let bytes = pattern.len();
    let remedy = format!("the pattern has {bytes} bytes, the limit is {PATTERN_BYTES_MAX}");
    ensure_field(bytes <= PATTERN_BYTES_MAX, field, remedy)?;
    match RegexBuilder::new(pattern).size_limit(compiled_max).build() {
        Ok(_) => Ok(()),
        Err(error) => {
            // The last line of several, which show the pattern.
            let error = error.to_string();
            let reason = error.lines().last().unwrap_or_default().trim_start_matches("error: ");
            ensure_field(false, field, format!("not a regular expression: {reason}"))
        }
    }
}
