//! The reasons why a spec cannot be used.

/// A field whose value cannot work, and advice how to correct it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("field {field}: {remedy} (R103)")]
pub struct FieldError {
    /// Path such as `evals[0].name`.
    pub field: String,
    /// Advice in words that follow the field's path.
    pub remedy: String,
}

/// The reason why a spec cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    #[error("the spec cannot be read (R102): {}", .0.to_string().trim_start_matches("error: "))]
    Yaml(serde_saphyr::Error),
    #[error(transparent)]
    Field(#[from] FieldError),
}
