//! Formats an error together with its causes.
use std::error::Error;

/// Formats an error and all its sources as one line, joined by `: `.
pub fn format_error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}
