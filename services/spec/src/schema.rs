//! The JSON Schemas of run specs, watch specs and generation specs, made from the types that read
//! them. Editors complete and check specs with them.

use schemars::{JsonSchema, Schema, generate::SchemaSettings, transform::RecursiveTransform};
use serde_json::Value;

use crate::{
    generation::GenerationSpec,
    run_spec::{RunSpec, WatchSpec},
};

/// The usual name of the file with the schema, in the directory of the specs.
pub const SCHEMA_FILE: &str = "run-spec.schema.json";
/// The usual name of the file with the schema of generation specs.
pub const GENERATION_SCHEMA_FILE: &str = "generation-spec.schema.json";

/// Returns the JSON Schema (draft 2020-12) of a run spec. What depends on several keys or on files is
/// left to [`RunSpec::parse`]. A key without a value, which may be taken for an absent one there,
/// does not match: it is most likely unfinished.
pub fn run_spec_schema() -> Value {
    build_schema::<RunSpec>()
}

/// Returns the JSON Schema of a watch spec, as [`run_spec_schema`] does that of a run spec.
pub fn watch_spec_schema() -> Value {
    build_schema::<WatchSpec>()
}

/// Returns the JSON Schema of a generation spec, as [`run_spec_schema`] does that of a run spec.
pub fn generation_spec_schema() -> Value {
    build_schema::<GenerationSpec>()
}

fn build_schema<T: JsonSchema>() -> Value {
    let transform = RecursiveTransform(simplify_schema);
    let settings = SchemaSettings::draft2020_12().with_transform(transform);
    settings.into_generator().into_root_schema_for::<T>().to_value()
}

/// Returns the schema of run specs in the form of its file.
pub fn run_spec_schema_text() -> String {
    format!("{:#}\n", run_spec_schema())
}

/// Adds a first line to a spec that names [`SCHEMA_FILE`] to editors.
pub fn add_schema_line(yaml: &str) -> String {
    format!("# yaml-language-server: $schema={SCHEMA_FILE}\n{yaml}")
}

/// Removes what is only of use to Rust, `null`, and defaults that repeat those of other keys.
fn simplify_schema(schema: &mut Schema) {
    remove_null(schema);
    schema.remove("writeOnly");
    if let Some(Value::String(description)) = schema.get_mut("description") {
        *description = description.replace('\n', " ");
    }
    let largest = match schema.remove("format").as_ref().and_then(Value::as_str) {
        Some("uint32") => Some(u32::MAX),
        _ => None,
    };
    if let (Some(largest), None) = (largest, schema.get("maximum")) {
        schema.insert("maximum".to_owned(), largest.into());
    }
    if matches!(schema.get("default"), Some(Value::Null | Value::Object(_))) {
        schema.remove("default");
    }
}

fn remove_null(schema: &mut Schema) {
    if let Some(Value::Array(types)) = schema.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = &types[..] {
            let only = only.clone();
            schema.insert("type".to_owned(), only);
        }
    }
    let Some(Value::Array(forms)) = schema.get_mut("anyOf") else { return };
    forms.retain(|form| form["type"] != "null");
    if let [Value::Object(only)] = &forms[..] {
        let only = only.clone();
        schema.remove("anyOf");
        schema.ensure_object().extend(only);
    }
}
