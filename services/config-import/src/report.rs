//! The result of an import: the spec, a note on each key, and the fields that are missing.

use serde::Serialize;
use spec::{FieldError, SpecError};

/// A run spec imported from another program, with notes on its origin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImportedSpec {
    /// Name of the program, as in arguments.
    pub program: &'static str,
    /// Kind of training, as in arguments.
    pub task: &'static str,
    /// As YAML. Missing fields are comments.
    pub spec: String,
    /// Sorted by status, then by key. Every key of the configuration is in it once.
    pub notes: Vec<ImportNote>,
    /// Fields that a user must add before the spec is valid.
    pub missing: Vec<MissingField>,
}

/// A note on one key of the configuration, or on a default that was used for a missing key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ImportNote {
    pub status: KeyStatus,
    pub key: String,
    /// The reason, or the field of the spec and its value.
    pub explanation: String,
}

/// The treatment of a key in an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyStatus {
    /// Without effect on the result, or settled elsewhere.
    Ignored,
    /// A missing key, for which the program's own default is used.
    Default,
    Used,
    Unknown,
    /// A setting that a run cannot follow: its result differs from the program's.
    Differs,
}

impl KeyStatus {
    /// Returns the lower-case name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ignored => "ignored",
            Self::Default => "default",
            Self::Used => "used",
            Self::Unknown => "unknown",
            Self::Differs => "differs",
        }
    }
}

/// A field of the spec that the configuration does not determine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MissingField {
    /// Path such as `raft.verifier`.
    pub field: String,
    pub remedy: String,
}

impl ImportedSpec {
    /// Returns a line for each note and each missing field.
    pub fn report_lines(&self) -> Vec<String> {
        let note = |note: &ImportNote| {
            format!("{} {}: {}", note.status.as_str(), note.key, note.explanation)
        };
        let missing =
            |missing: &MissingField| format!("missing {}: {}", missing.field, missing.remedy);
        self.notes.iter().map(note).chain(self.missing.iter().map(missing)).collect()
    }

    /// Fails if fields are missing.
    pub fn check_complete(&self) -> Result<(), ImportError> {
        if self.missing.is_empty() {
            return Ok(());
        }
        let fields: Vec<&str> = self.missing.iter().map(|it| it.field.as_str()).collect();
        Err(ImportError::Incomplete { fields: fields.join(" and ") })
    }
}

/// The reason why a configuration cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("there is no program {name:?}; it must be one of: {known} (A101)")]
    NoProgram { name: String, known: String },
    #[error("there is no task {name:?}; it must be one of: {known} (A101)")]
    NoTask { name: String, known: String },
    #[error("it is neither YAML nor JSON")]
    Yaml(#[source] SpecError),
    #[error("it is not a configuration: expected keys with values (R102)")]
    Shape,
    #[error("it has {size}, the limit is {limit} (R102)")]
    TooLarge { size: String, limit: usize },
    #[error("its keys are those of no known program; name it with --from: {known} (A100)")]
    Unrecognized { known: String },
    #[error("its keys are those of {programs}; name one with --from (A100)")]
    Ambiguous { programs: String },
    #[error("{place}: expected {expected}, not {found} (R102)")]
    Value { place: String, expected: &'static str, found: String },
    #[error("{place}: {task:?} cannot be imported; name one of {known} with --task (R102)")]
    Task { place: String, task: String, known: String },
    #[error("--verifier is not YAML")]
    Verifier(#[source] SpecError),
    #[error("{place}, which becomes the spec's")]
    Field {
        place: String,
        #[source]
        source: FieldError,
    },
    #[error("the converted spec cannot run")]
    Spec(#[source] SpecError),
    #[error("the spec is not complete: add {fields}, or name it by an option (R103)")]
    Incomplete { fields: String },
}
