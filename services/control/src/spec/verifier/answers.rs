//! Verifiers that read the completion and compare it.

use regex::RegexBuilder;
use serde::Deserialize;
use serde_json::Value;
use wire::v1::verifier::{Exact, JsonSchema, Numeric, Regex, ToolCall};

use crate::check::{Checked, ensure, within};

/// Longest regular expression as written; a longer one takes memory out of proportion.
const PATTERN_BYTES_MAX: usize = 4096;

/// Largest expression to extract with, and one to find, once compiled; the latter is what the
/// verifier accepts once the answer is in it.
const EXTRACT_BYTES_MAX: usize = 10 << 20;
const FIND_BYTES_MAX: usize = 1 << 20;

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExactSpec {
    pub extract: String,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NumericSpec {
    pub extract: String,
    pub tolerance: f64,
    pub relative_tolerance: f64,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegexSpec {
    pub pattern: String,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct JsonSchemaSpec {
    /// Without: the prompt's field "schema".
    pub schema: Option<Value>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ToolCallSpec {
    pub ordered: bool,
    pub partial: bool,
}

impl Default for NumericSpec {
    fn default() -> Self {
        Self { extract: String::new(), tolerance: 1e-6, relative_tolerance: 0.0 }
    }
}

impl ExactSpec {
    pub(super) fn check(&self, field: &str) -> Checked {
        pattern(field, &self.extract, EXTRACT_BYTES_MAX)
    }
}

impl NumericSpec {
    pub(super) fn check(&self, field: &str) -> Checked {
        pattern(field, &self.extract, EXTRACT_BYTES_MAX)?;
        within(&format!("{field}.tolerance"), self.tolerance, 0.0, f64::MAX)?;
        within(&format!("{field}.relative_tolerance"), self.relative_tolerance, 0.0, 1.0)
    }
}

impl RegexSpec {
    pub(super) fn check(&self, field: &str) -> Checked {
        pattern(field, &self.pattern, FIND_BYTES_MAX)
    }
}

impl JsonSchemaSpec {
    pub(super) fn check(&self, field: &str) -> Checked {
        let Some(schema) = &self.schema else { return Ok(()) };
        let at = format!("{field}.schema");
        // Nothing it refers to is fetched.
        match jsonschema::validator_for(schema) {
            Ok(_) => Ok(()),
            Err(error) => ensure(false, &at, format!("not a JSON schema: {error}")),
        }
    }
}

fn pattern(field: &str, pattern: &str, compiled_max: usize) -> Checked {
    let bytes = pattern.len();
    let remedy = format!("the pattern has {bytes} bytes, the limit is {PATTERN_BYTES_MAX}");
    ensure(bytes <= PATTERN_BYTES_MAX, field, remedy)?;
    match RegexBuilder::new(pattern).size_limit(compiled_max).build() {
        Ok(_) => Ok(()),
        Err(error) => ensure(false, field, format!("not a regular expression: {error}")),
    }
}

impl From<&ExactSpec> for Exact {
    fn from(spec: &ExactSpec) -> Self {
        Self { extract: spec.extract.clone() }
    }
}

impl From<&NumericSpec> for Numeric {
    fn from(spec: &NumericSpec) -> Self {
        let NumericSpec { extract, tolerance, relative_tolerance } = spec.clone();
        Self { extract, tolerance, relative_tolerance }
    }
}

impl From<&RegexSpec> for Regex {
    fn from(spec: &RegexSpec) -> Self {
        Self { pattern: spec.pattern.clone() }
    }
}

impl From<&JsonSchemaSpec> for JsonSchema {
    fn from(spec: &JsonSchemaSpec) -> Self {
        Self { schema: spec.schema.as_ref().map_or(String::new(), Value::to_string) }
    }
}

impl From<&ToolCallSpec> for ToolCall {
    fn from(&ToolCallSpec { ordered, partial }: &ToolCallSpec) -> Self {
        Self { ordered, partial }
    }
}
