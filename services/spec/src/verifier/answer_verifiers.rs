//! Verifiers that compare the completion with an expected answer.

use jsonschema::PatternOptions;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use wire::v1::verifier::{Exact, JsonSchema, Numeric, Regex, ToolCall};

use crate::field_checks::{
    EXTRACT_COMPILED_MAX, FieldResult, check_pattern, check_range, ensure_field,
};

/// Compiled size of an expression for `pattern`: the verifier's own limit for the expression with
/// the answer inserted.
const FIND_COMPILED_MAX: usize = 1 << 20;

/// A verifier that compares the candidate with the prompt's answer.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ExactSpec {
    /// Regular expression that finds the candidate. Empty: the whole completion.
    #[schemars(length(max = 4096), example = r"#(\d+)$")]
    pub extract: String,
}

/// A verifier that compares numbers.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NumericSpec {
    /// Regular expression that finds the candidate. Empty: a `\boxed{…}`, the number after `####`,
    /// or the last number.
    #[schemars(length(max = 4096))]
    pub extract: String,
    /// Largest absolute difference.
    #[schemars(range(min = 0.0))]
    pub tolerance: f64,
    /// Largest difference, as a share of the expected number.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub relative_tolerance: f64,
}

/// A verifier that searches the completion for a pattern.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RegexSpec {
    /// Regular expression. `{answer}` stands for the prompt's answer, escaped.
    #[schemars(length(max = 4096), example = "(?m)^result: {answer}$")]
    pub pattern: String,
}

/// A verifier that validates JSON in the completion against a schema.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct JsonSchemaSpec {
    /// The JSON schema. Default: the prompt's field `schema`.
    pub schema: Option<Value>,
}

/// A verifier that compares the tool calls of a completion with the expected ones.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields, default)]
pub struct ToolCallSpec {
    /// The order of the calls matters.
    pub ordered: bool,
    /// Reward readable calls and correct tools with wrong arguments in part.
    pub partial: bool,
}

impl Default for NumericSpec {
    fn default() -> Self {
        Self { extract: String::new(), tolerance: 1e-6, relative_tolerance: 0.0 }
    }
}

impl ExactSpec {
    pub(super) fn check_fields(&self, field: &str) -> FieldResult {
        check_pattern(&format!("{field}.extract"), &self.extract, EXTRACT_COMPILED_MAX)
    }
}

impl NumericSpec {
    pub(super) fn check_fields(&self, field: &str) -> FieldResult {
        check_pattern(&format!("{field}.extract"), &self.extract, EXTRACT_COMPILED_MAX)?;
        check_range(&format!("{field}.tolerance"), self.tolerance, 0.0, f64::MAX)?;
        check_range(&format!("{field}.relative_tolerance"), self.relative_tolerance, 0.0, 1.0)
    }
}

impl RegexSpec {
    pub(super) fn check_fields(&self, field: &str) -> FieldResult {
        check_pattern(field, &self.pattern, FIND_COMPILED_MAX)
    }
}

impl JsonSchemaSpec {
    pub(super) fn check_fields(&self, field: &str) -> FieldResult {
        let Some(schema) = &self.schema else { return Ok(()) };
        let at = format!("{field}.schema");
        if let Err(remedy) = wire::check_schema_patterns(schema) {
            return ensure_field(false, &at, remedy);
        }
        // As the verifier compiles it. References to other documents are not fetched.
        let patterns = PatternOptions::regex().size_limit(wire::COMPILED_PATTERN_MAX);
        match jsonschema::options().with_pattern_options(patterns).build(schema) {
            Ok(_) => Ok(()),
            Err(error) => ensure_field(false, &at, format!("not a JSON schema: {error}")),
        }
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
