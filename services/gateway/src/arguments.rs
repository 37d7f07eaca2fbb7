//! Converts request fields to domain types. Errors name the field.

use std::collections::BTreeSet;

use store::{PathError, RelativePath};
use wire::{IdError, RunId, SuiteName, v1};

const REASON_BYTES_MAX: usize = 4096;
const COMPARED_MAX: usize = 8;

#[derive(Debug, thiserror::Error)]
#[error("field {field}: {problem} (G101)")]
pub(crate) struct ArgumentError {
    field: &'static str,
    problem: String,
}

impl ArgumentError {
    fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self { field, problem: problem.into() }
    }
}

pub(crate) fn require_spec_yaml(text: &str) -> Result<&str, ArgumentError> {
    if text.trim().is_empty() {
        return Err(ArgumentError::new("spec_yaml", "empty; pass the run spec"));
    }
    Ok(text)
}

pub(crate) fn check_reason(text: &str) -> Result<&str, ArgumentError> {
    let bytes = text.len();
    if bytes > REASON_BYTES_MAX {
        let problem = format!("it has {bytes} bytes, the limit is {REASON_BYTES_MAX}");
        return Err(ArgumentError::new("reason", problem));
    }
    Ok(text)
}

pub(crate) fn parse_runs(names: &[String]) -> Result<BTreeSet<RunId>, ArgumentError> {
    if !(1..=COMPARED_MAX).contains(&names.len()) {
        let problem = format!("has {} runs; pass 1 to {COMPARED_MAX}", names.len());
        return Err(ArgumentError::new("runs", problem));
    }
    let run = |name: &String| {
        RunId::new(name.as_str()).map_err(|error| ArgumentError::new("runs", error.to_string()))
    };
    names.iter().map(run).collect()
}

/// Parses a run and a suite; an empty field matches all.
pub(crate) fn parse_filter(
    filter: Option<v1::EvalFilter>,
) -> Result<(Option<RunId>, String), IdError> {
    let v1::EvalFilter { run, suite } = filter.unwrap_or_default();
    let run = if run.is_empty() { None } else { Some(RunId::new(run)?) };
    if !suite.is_empty() {
        SuiteName::new(suite.as_str())?;
    }
    Ok((run, suite))
}

pub(crate) fn check_checkpoint_ref(
    reference: Option<v1::CheckpointRef>,
) -> Result<v1::CheckpointRef, ArgumentError> {
    let missing = || ArgumentError::new("checkpoint", "missing; pass at least the run");
    let reference = reference.ok_or_else(missing)?;
    RunId::new(reference.run.as_str())
        .map_err(|error| ArgumentError::new("checkpoint", error.to_string()))?;
    Ok(reference)
}

pub(crate) fn parse_path(path: String) -> Result<RelativePath, PathError> {
    RelativePath::new(path)
}
