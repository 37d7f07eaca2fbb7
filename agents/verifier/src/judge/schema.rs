//! JSON that a schema admits (json-schema.org; the draft its `$schema` names, else 2020-12).

use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

use crate::{calls::Item, judge::json, opinion::Opinion};

/// Of what is wrong with a document, told.
const ERRORS_MAX: usize = 3;

/// The settings' schema; without one, each prompt brings its own.
#[derive(Debug)]
pub(crate) struct Schema(Option<Validator>);

impl Schema {
    /// # Errors
    /// When the text is no JSON schema.
    pub(crate) fn new(schema: &str) -> Result<Self, String> {
        if schema.is_empty() {
            return Ok(Self(None));
        }
        let schema = serde_json::from_str(schema).map_err(|error| error.to_string())?;
        compile(&schema).map(Some).map(Self)
    }

    pub(crate) fn judge(&self, item: &Item) -> Opinion {
        if let Some(validator) = &self.0 {
            return admits(validator, item);
        }
        let schema = match item.fields.get("schema") {
            // Some data sets write it as text.
            Some(Value::String(text)) => serde_json::from_str(text).ok(),
            other => other.cloned(),
        };
        match schema.as_ref().map(compile) {
            None => {
                Opinion::error("neither the settings nor the prompt's field \"schema\" has one")
            }
            Some(Err(error)) => Opinion::error(format!("the prompt's field \"schema\": {error}")),
            Some(Ok(validator)) => admits(&validator, item),
        }
    }
}

/// Nothing it refers to is fetched, and its patterns take time in proportion to the text.
fn compile(schema: &Value) -> Result<Validator, String> {
    let options = jsonschema::options().with_pattern_options(PatternOptions::regex());
    options.build(schema).map_err(|error| error.to_string())
}

fn admits(validator: &Validator, item: &Item) -> Opinion {
    let Some(document) = json::document(&item.completion) else {
        return Opinion::fail("no JSON: neither the completion nor a block of it");
    };
    let wrong: Vec<String> = validator
        .iter_errors(&document)
        .take(ERRORS_MAX)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    if wrong.is_empty() { Opinion::pass() } else { Opinion::fail(wrong.join("; ")) }
}
