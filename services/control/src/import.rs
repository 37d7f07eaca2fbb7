//! A halo-forge configuration (its version 1, YAML) as a run spec, and what became of each key.
//! Most of these keys halo-forge itself never read, or only from its command line.

mod keys;
mod spec;
mod verifier;

use serde_json::Value;

use self::{keys::Keys, spec::Draft};

/// A spec, and what is to be told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// YAML.
    pub spec: String,
    pub notes: Vec<Note>,
}

/// What became of a key, or what was taken where there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    pub key: String,
    pub fate: Fate,
    pub said: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Used,
    Ignored,
    Unknown,
    /// Not written there: halo-forge's own default.
    Default,
}

impl Fate {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Used => "used",
            Self::Ignored => "ignored",
            Self::Unknown => "unknown",
            Self::Default => "default",
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("it is no YAML (R102)")]
    Yaml(#[source] serde_saphyr::Error),
    #[error("it is no configuration: expected keys with values (R102)")]
    Shape,
    #[error("key {key}: expected {expected}, not {found} (R102)")]
    Value { key: String, expected: &'static str, found: String },
    #[error("it names no prompts; name them with --prompts (A100)")]
    NoPrompts,
    #[error("what comes of it is no spec that can run")]
    Spec(#[source] Box<crate::SubmitError>),
}

/// Reads a configuration. `name` is what runs are called; `prompts` is taken in place of its own.
///
/// # Errors
/// When it is none, a value cannot be read, or no spec comes of it.
pub fn import(yaml: &str, name: &str, prompts: Option<&str>) -> Result<Imported, ImportError> {
    let config: Value = serde_saphyr::from_str(yaml).map_err(ImportError::Yaml)?;
    let mut keys = Keys::of(config)?;
    let draft = Draft::take(&mut keys, prompts)?;
    let spec = draft.write(name);
    crate::RunSpec::parse(&spec).map_err(|error| ImportError::Spec(Box::new(error)))?;
    Ok(Imported { spec, notes: keys.end() })
}

#[cfg(test)]
mod tests;
