//! Run specs as users write them: the JSON Schema and the page that describe them, specs that are
//! accepted, and errors about broken ones.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod accepted;
mod bounds;
mod broken;
mod generated;
mod reference_page;

use std::path::{Path, PathBuf};

use jsonschema::Validator;
use serde_json::Value;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn schema_validator() -> Validator {
    jsonschema::validator_for(&spec::run_spec_schema()).unwrap()
}

/// Returns the places at which a document differs from the schema, with the reasons.
fn schema_errors(validator: &Validator, document: &Value) -> Vec<String> {
    let errors = validator.iter_errors(document);
    errors.map(|error| format!("{}: {error}", error.instance_path())).collect()
}
