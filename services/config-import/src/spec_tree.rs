//! A spec in parts, in the order in which they are written as YAML.

use std::fmt::Write;

use serde_json::Value;

use crate::report::MissingField;

/// A section of a spec, or a value in it.
#[derive(Debug, Clone, PartialEq)]
enum SpecNode {
    Section(SpecTree),
    Value(Value),
    /// A field that the user must add, with an example.
    Missing {
        example: Value,
        remedy: String,
    },
}

/// The fields of a section, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct SpecTree {
    fields: Vec<(String, SpecNode)>,
}

/// The form of missing fields in the YAML of a spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MissingForm {
    Comment,
    /// The example, so that the other fields can be checked.
    Example,
}

impl SpecTree {
    /// Sets a field by its path, such as `sft.training.epochs`.
    pub(crate) fn set_value(&mut self, path: &str, value: impl Into<Value>) {
        self.insert(path, SpecNode::Value(value.into()));
    }

    pub(crate) fn set_missing(&mut self, path: &str, example: Value, remedy: &str) {
        self.insert(path, SpecNode::Missing { example, remedy: remedy.to_owned() });
    }

    fn insert(&mut self, path: &str, node: SpecNode) {
        let (name, rest) = match path.split_once('.') {
            Some((name, rest)) => (name, Some(rest)),
            None => (path, None),
        };
        let place = self.fields.iter().position(|(own, _)| own == name).unwrap_or_else(|| {
            self.fields.push((name.to_owned(), SpecNode::Section(Self::default())));
            self.fields.len() - 1
        });
        let found = &mut self.fields[place].1;
        match (rest, found) {
            (None, found) => *found = node,
            (Some(rest), SpecNode::Section(section)) => section.insert(rest, node),
            (Some(rest), found) => {
                let mut section = Self::default();
                section.insert(rest, node);
                *found = SpecNode::Section(section);
            }
        }
    }

    /// Returns the fields that the user must add.
    pub(crate) fn missing_fields(&self) -> Vec<MissingField> {
        let mut missing = Vec::new();
        self.collect_missing("", &mut missing);
        missing
    }

    fn collect_missing(&self, section: &str, missing: &mut Vec<MissingField>) {
        for (name, node) in &self.fields {
            let field = if section.is_empty() { name.clone() } else { format!("{section}.{name}") };
            match node {
                SpecNode::Section(inner) => inner.collect_missing(&field, missing),
                SpecNode::Value(_) => {}
                SpecNode::Missing { remedy, .. } => {
                    missing.push(MissingField { field, remedy: remedy.clone() });
                }
            }
        }
    }

    /// Writes the spec.
    pub(crate) fn to_yaml(&self, form: MissingForm) -> String {
        let mut text = String::new();
        self.write_yaml(0, form, &mut text);
        text
    }

    fn write_yaml(&self, depth: usize, form: MissingForm, text: &mut String) {
        let indent = "  ".repeat(depth);
        for (name, node) in &self.fields {
            // Writing to a string cannot fail.
            let _ = match (node, form) {
                (SpecNode::Section(section), _) => {
                    let _ = writeln!(text, "{indent}{name}:");
                    section.write_yaml(depth + 1, form, text);
                    Ok(())
                }
                (SpecNode::Value(value), _)
                | (SpecNode::Missing { example: value, .. }, MissingForm::Example) => {
                    writeln!(text, "{indent}{name}: {}", write_value(value))
                }
                (SpecNode::Missing { example, remedy }, MissingForm::Comment) => {
                    let value = write_value(example);
                    writeln!(text, "{indent}# {name}: {value}   # missing: {remedy}")
                }
            };
        }
    }
}

/// Writes a value in one line, as YAML.
pub(crate) fn write_value(value: &Value) -> String {
    match value {
        Value::Number(number) => match number.as_f64() {
            Some(float) if float.fract() == 0.0 && float.abs() < 1e15 => format!("{float:.0}"),
            _ => number.to_string(),
        },
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(write_value).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(section) if section.is_empty() => "{}".to_owned(),
        Value::Object(section) => {
            let field = |(name, value): (&String, &Value)| {
                format!("{}: {}", write_key(name), write_value(value))
            };
            let fields: Vec<String> = section.iter().map(field).collect();
            format!("{{ {} }}", fields.join(", "))
        }
        // Every JSON text is a YAML text.
        Value::Null | Value::Bool(_) | Value::String(_) => value.to_string(),
    }
}

fn write_key(name: &str) -> String {
    let is_plain = name.starts_with(|sign: char| sign.is_ascii_lowercase())
        && name.chars().all(|sign| sign.is_ascii_lowercase() || sign == '_');
    if is_plain { name.to_owned() } else { Value::from(name).to_string() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_of_a_section_are_written_together_in_order() {
        let mut tree = SpecTree::default();
        tree.set_value("name", "a: \"b\"");
        tree.set_value("sft.data", "x.jsonl");
        tree.set_value("seed", 7.0);
        tree.set_value("sft.lora.alpha", 0.5);
        tree.set_missing("base.model", json!("org/name"), "name it");
        tree.set_value("sft.lora.modules", json!([{"a b": 1}, {}]));
        let text = "name: \"a: \\\"b\\\"\"\nsft:\n  data: \"x.jsonl\"\n  lora:\n    alpha: 0.5\n    \
                    modules: [{ \"a b\": 1 }, {}]\nseed: 7\nbase:\n  # model: \"org/name\"   # \
                    missing: name it\n";
        assert_eq!(tree.to_yaml(MissingForm::Comment), text);
        assert!(tree.to_yaml(MissingForm::Example).ends_with("base:\n  model: \"org/name\"\n"));
        let missing = tree.missing_fields();
        assert_eq!((missing.len(), missing[0].field.as_str()), (1, "base.model"));
    }
}
