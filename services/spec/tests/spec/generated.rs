//! The files that are written from the schema: the schema itself beside the examples, and the page
//! of all keys. `make spec-reference` writes them.

use std::fs;

use serde_json::Value;

use crate::{reference_page::write_page, repository};

/// If it is set, the files are written instead of compared.
const WRITE: &str = "FLOTILLA_WRITE_GENERATED";

fn assert_current(path: &str, expected: &str) {
    let file = repository().join(path);
    if std::env::var_os(WRITE).is_some() {
        fs::write(&file, expected).unwrap();
    }
    let found = fs::read_to_string(&file).unwrap_or_default();
    assert!(found == expected, "{path} is not up to date; `make spec-reference` writes it");
}

#[test]
fn the_schema_and_the_page_in_the_repository_are_those_of_the_types() {
    let schema = spec::run_spec_schema();
    assert_current(&format!("examples/{}", spec::SCHEMA_FILE), &spec::run_spec_schema_text());
    let generation = format!("{:#}\n", spec::generation_spec_schema());
    assert_current(&format!("examples/{}", spec::GENERATION_SCHEMA_FILE), &generation);
    assert_current("docs/SPEC.md", &write_page(&schema));
}

/// Adds the paths of keys without a description, neither own nor that of their section.
fn collect_undescribed(schema: &Value, node: &Value, path: &str, found: &mut Vec<String>) {
    match node {
        Value::Object(node) => {
            for (name, inner) in node {
                let inner_path = format!("{path}/{name}");
                let is_key = path.ends_with("/properties");
                if is_key && describe_key(schema, inner).is_none() {
                    found.push(inner_path.clone());
                }
                collect_undescribed(schema, inner, &inner_path, found);
            }
        }
        Value::Array(nodes) => {
            nodes.iter().for_each(|inner| collect_undescribed(schema, inner, path, found));
        }
        _ => {}
    }
}

fn describe_key<'a>(schema: &'a Value, key: &'a Value) -> Option<&'a str> {
    let of_section = || {
        let pointer = key["$ref"].as_str()?.strip_prefix('#')?;
        schema.pointer(pointer)?["description"].as_str()
    };
    key["description"].as_str().or_else(of_section)
}

#[test]
fn every_key_is_described_and_no_section_takes_unknown_ones() {
    for (schema, least) in [(spec::run_spec_schema(), 30), (spec::generation_spec_schema(), 20)] {
        assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
        let mut undescribed = Vec::new();
        collect_undescribed(&schema, &schema, "", &mut undescribed);
        assert!(undescribed.is_empty(), "{undescribed:#?}");
        let sections = schema["$defs"].as_object().unwrap().iter();
        let objects = sections.filter(|(_, it)| it["type"] == "object");
        let names: Vec<&String> = objects
            .map(|(name, section)| {
                assert_eq!(section["additionalProperties"], false, "{name}");
                name
            })
            .collect();
        assert!(names.len() > least, "these are not all: {names:?}");
    }
}
