//! JSON that a schema accepts (json-schema.org; the draft that its `$schema` names, otherwise
//! 2020-12).

use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

use crate::{calls::VerifyItem, judge::json, judge_result::JudgeResult};

/// In a verdict's detail.
const ERRORS_MAX: usize = 3;

/// Without a schema in the settings, each prompt has its own.
#[derive(Debug)]
pub(crate) struct SchemaVerifier(Option<Validator>);

impl SchemaVerifier {
    pub(crate) fn new(schema: &str) -> Result<Self, String> {
        if schema.is_empty() {
            return Ok(Self(None));
        }
        let schema = serde_json::from_str(schema).map_err(|error| error.to_string())?;
        compile_schema(&schema).map(Some).map(Self)
    }

    pub(crate) fn judge_item(&self, item: &VerifyItem) -> JudgeResult {
        if let Some(validator) = &self.0 {
            return judge_document(validator, item);
        }
        let schema = match item.fields.get("schema") {
            // Some data sets store the schema as text.
            Some(Value::String(text)) => serde_json::from_str(text).ok(),
            other => other.cloned(),
        };
        match schema.as_ref().map(compile_schema) {
            None => JudgeResult::input_error(
                "neither the settings nor the prompt's field \"schema\" has one",
            ),
            Some(Err(error)) => {
                JudgeResult::input_error(format!("the prompt's field \"schema\": {error}"))
            }
            Some(Ok(validator)) => judge_document(&validator, item),
        }
    }
}

/// Never fetches references; patterns take time linear in the text.
fn compile_schema(schema: &Value) -> Result<Validator, String> {
    wire::check_schema_patterns(schema)?;
    let patterns = PatternOptions::regex().size_limit(wire::COMPILED_PATTERN_MAX);
    let options = jsonschema::options().with_pattern_options(patterns);
    options.build(schema).map_err(|error| error.to_string())
}

fn judge_document(validator: &Validator, item: &VerifyItem) -> JudgeResult {
    let Some(document) = json::find_document(&item.completion) else {
        return JudgeResult::failed_because("not JSON: neither the completion nor a block of it");
    };
    let wrong: Vec<String> = validator
        .iter_errors(&document)
        .take(ERRORS_MAX)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    if wrong.is_empty() {
        JudgeResult::full_pass()
    } else {
        JudgeResult::failed_because(wrong.join("; "))
    }
}
