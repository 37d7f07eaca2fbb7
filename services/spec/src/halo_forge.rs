//! Imports a halo-forge configuration (version 1, YAML) as a run spec, with a note on each key.
//! halo-forge itself ignored most of these keys, or read them only from its command line.

mod config_keys;
mod spec_draft;
mod verifier_section;

use serde_json::Value;

use crate::{error::SpecError, run_spec::RunSpec, yaml::parse_yaml};

use self::{config_keys::ConfigKeys, spec_draft::SpecDraft};

/// A run spec imported from another tool, with notes on its origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportedSpec {
    /// As YAML.
    pub spec: String,
    pub notes: Vec<ImportNote>,
}

/// A note on one key of the configuration, or on a default that was used for a missing key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportNote {
    pub key: String,
    pub status: KeyStatus,
    /// The reason, or the value that was used.
    pub explanation: String,
}

/// The treatment of a key in an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyStatus {
    Used,
    Ignored,
    Unknown,
    /// A missing key, for which halo-forge's own default is used.
    Default,
}

impl KeyStatus {
    /// Returns the lower-case name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Used => "used",
            Self::Ignored => "ignored",
            Self::Unknown => "unknown",
            Self::Default => "default",
        }
    }
}

/// The reason why a configuration cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("it is not YAML")]
    Yaml(#[source] SpecError),
    #[error("it is not a configuration: expected keys with values (R102)")]
    Shape,
    #[error("key {key}: expected {expected}, not {found} (R102)")]
    Value { key: String, expected: &'static str, found: String },
    #[error("it names no prompts; name them with --prompts (A100)")]
    NoPrompts,
    #[error("the converted spec cannot run")]
    Spec(#[source] Box<SpecError>),
}

/// Converts a halo-forge configuration into a spec with the name `name`, and notes on each key.
/// `prompts` is the path of a prompts file and replaces the configuration's own; no file is read.
/// Fails if the YAML or a value is invalid, no prompts are named or the resulting spec is invalid.
pub fn import_halo_forge(
    yaml: &str,
    name: &str,
    prompts: Option<&str>,
) -> Result<ImportedSpec, ImportError> {
    let config: Value = parse_yaml(yaml).map_err(ImportError::Yaml)?;
    let mut keys = ConfigKeys::from_config(config)?;
    let draft = SpecDraft::from_keys(&mut keys, prompts)?;
    let spec = draft.to_yaml(name);
    RunSpec::parse(&spec).map_err(|error| ImportError::Spec(Box::new(error)))?;
    Ok(ImportedSpec { spec, notes: keys.into_notes() })
}

#[cfg(test)]
mod tests;
