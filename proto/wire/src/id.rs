//! Names that appear in subjects and paths: short, lower case, safe everywhere.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A name that may not stand in a subject or a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} {name:?} must be 1 to 64 of a-z, 0-9, '-' and '_', and start with a letter or digit (R115)"
)]
pub struct IdError {
    pub what: &'static str,
    pub name: String,
}

/// Of any name.
pub const NAME_BYTES_MAX: usize = 64;

/// Of a name in an error.
const NAME_CHARS_MAX: usize = 100;

fn check(what: &'static str, name: &str) -> Result<(), IdError> {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
    let starts_well = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if starts_well && name.len() <= NAME_BYTES_MAX && name.bytes().all(legal) {
        return Ok(());
    }
    // A hostile name must not drown what is said of it.
    Err(IdError { what, name: name.chars().take(NAME_CHARS_MAX).collect() })
}

/// Of a name made from somebody's words; a number is still to fit behind it.
const SLUG_BYTES_MAX: usize = 48;

/// A legal name that looks like the text; `None` when nothing of it may stand in one.
pub fn slug(text: &str) -> Option<String> {
    let legal = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
    let name: String = text.to_lowercase().chars().map(legal).collect();
    let name = name.trim_start_matches(['-', '_']);
    // One byte a character by now.
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
            /// # Errors
            /// When the name does not have the form of an id.
            pub fn new(name: impl Into<String>) -> Result<Self, IdError> {
                let name = name.into();
                check($what, &name)?;
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
            assert_eq!(slug(text).as_deref(), Some(name), "{text:?}");
        }
        assert_eq!(slug("--"), None);
        assert!(RunId::new(slug(&"x".repeat(200)).unwrap() + "-1000000").is_ok());
    }
}
