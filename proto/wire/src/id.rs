//! Identifiers that are safe in subjects and paths: short, lower case, without dots and slashes.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} {name:?} must be 1 to 64 of a-z, 0-9, '-' and '_', and start with a letter or digit (R115)"
)]
pub struct IdError {
    /// For example `run` or `agent`.
    pub what: &'static str,
    /// Cut to 100 characters.
    pub name: String,
}

pub const NAME_BYTES_MAX: usize = 64;

const ERROR_NAME_CHARS_MAX: usize = 100;

/// Checks for 1 to 64 of `a-z`, `0-9`, `-` and `_`, beginning with a letter or a digit.
fn check_id(what: &'static str, name: &str) -> Result<(), IdError> {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
    let starts_well = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if starts_well && name.len() <= NAME_BYTES_MAX && name.bytes().all(legal) {
        return Ok(());
    }
    // Cut the name so that a hostile one does not hide the rest of the message.
    Err(IdError { what, name: name.chars().take(ERROR_NAME_CHARS_MAX).collect() })
}

/// Leaves room for a number behind the slug within [`NAME_BYTES_MAX`].
const SLUG_BYTES_MAX: usize = 48;

/// Makes a valid identifier that resembles `text`: lower case, other characters replaced by `-`.
/// Returns `None` if no valid character is left.
///
/// ```text
/// "Qwen2.5 0.5B/" -> "qwen2-5-0-5b"
/// ```
pub fn make_slug(text: &str) -> Option<String> {
    let legal = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
    let name: String = text.to_lowercase().chars().map(legal).collect();
    let name = name.trim_start_matches(['-', '_']);
    // All characters are ASCII here, so bytes and characters are the same.
    let name = name[..name.len().min(SLUG_BYTES_MAX)].trim_end_matches('-');
    (!name.is_empty()).then(|| name.to_owned())
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Checks a name.
            pub fn new(name: impl Into<String>) -> Result<Self, IdError> {
                let name = name.into();
                check_id($what, &name)?;
                Ok(Self(name))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(name: &str) -> Result<Self, IdError> {
                Self::new(name)
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(name: String) -> Result<Self, IdError> {
                Self::new(name)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
    };
}

id!(
    /// One run, from submission to its `done`.
    RunId, "run");
id!(
    /// One agent process of the fleet, by the name its owner gave it.
    AgentId, "agent");
id!(
    /// One piece of a cycle's generation, unique within the cycle.
    JobId, "job");
id!(
    /// A group of agents that share work.
    Pool, "pool");
id!(
    /// An evaluation of a run, by the name its spec gave it.
    SuiteName, "suite");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_break_a_subject_or_a_path_are_refused() {
        for name in ["", "a.b", "a b", "*", ">", "../x", "Upper", "-x", &"x".repeat(65)] {
            assert!(RunId::new(name).is_err(), "{name:?} was accepted");
        }
        let error = RunId::new("é".repeat(60_000)).unwrap_err().to_string();
        assert!(error.len() < 400 && error.contains("must be 1 to 64"), "{error}");
        for name in ["a", "raft-1", "0_b", &"x".repeat(64)] {
            assert!(RunId::new(name).is_ok(), "{name:?} was refused");
        }
    }

    #[test]
    fn any_text_makes_a_legal_name_or_none() {
        let cases = [("out", "out"), ("Qwen2.5 0.5B/", "qwen2-5-0-5b"), ("_x", "x"), ("é-1", "1")];
        for (text, name) in cases {
            assert_eq!(make_slug(text).as_deref(), Some(name), "{text:?}");
        }
        assert_eq!(make_slug("--"), None);
        assert!(RunId::new(make_slug(&"x".repeat(200)).unwrap() + "-1000000").is_ok());
    }
}
