//! Inputs and the outputs they call for, as prompts have them.

use serde_json::Value;

use crate::calls::Item;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Case {
    pub input: String,
    pub output: String,
}

/// `cases` or `test_cases`: a list of `{"input", "output"}`; or `input_output` as APPS has it, with
/// lists `inputs` and `outputs`. None is none; the error says what cannot be read.
pub(super) fn cases(item: &Item) -> Result<Vec<Case>, String> {
    if let Some(value) = item.fields.get("input_output").and_then(parsed) {
        return paired(&value).ok_or_else(|| {
            "the prompt's field \"input_output\" has no lists \"inputs\" and \"outputs\" of texts, as \
             many of each"
                .into()
        });
    }
    let named = ["cases", "test_cases"]
        .into_iter()
        .find_map(|name| item.fields.get(name).and_then(parsed).map(|value| (name, value)));
    let Some((name, value)) = named else { return Ok(Vec::new()) };
    let wrong = || format!("the prompt's field {name:?} is no list of {{\"input\", \"output\"}}");
    value.as_array().and_then(|list| list.iter().map(case).collect()).ok_or_else(wrong)
}

/// Some data sets write JSON as text.
fn parsed(value: &Value) -> Option<Value> {
    match value {
        Value::Null => None,
        Value::String(text) => serde_json::from_str(text).ok().or_else(|| Some(value.clone())),
        other => Some(other.clone()),
    }
}

fn case(value: &Value) -> Option<Case> {
    let one_of = |names: &[&str]| names.iter().find_map(|name| value.get(name));
    let input = one_of(&["input", "stdin"]).map_or(Some(String::new()), text)?;
    let output = text(one_of(&["output", "stdout", "expected_output", "expected"])?)?;
    Some(Case { input, output })
}

fn paired(value: &Value) -> Option<Vec<Case>> {
    let (inputs, outputs) = (value["inputs"].as_array()?, value["outputs"].as_array()?);
    if inputs.len() != outputs.len() {
        return None;
    }
    let case = |(input, output)| Some(Case { input: text(input)?, output: text(output)? });
    inputs.iter().zip(outputs).map(case).collect()
}

/// A text, or lines of it.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Array(lines) => {
            let lines: Option<Vec<String>> = lines.iter().map(text).collect();
            Some(lines?.join("\n"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(fields: Value) -> Result<Vec<(String, String)>, String> {
        let Value::Object(fields) = fields else { panic!("fields") };
        let found = cases(&Item { fields, ..Item::example() })?;
        Ok(found.into_iter().map(|case| (case.input, case.output)).collect())
    }

    #[test]
    fn cases_are_found_by_any_convention() {
        let expected = Ok(vec![("1".to_owned(), "2".to_owned())]);
        for fields in [
            json!({"cases": [{"input": "1", "output": "2"}]}),
            json!({"test_cases": [{"stdin": "1", "expected": 2}]}),
            json!({"input_output": {"inputs": ["1"], "outputs": ["2"]}}),
            json!({"input_output": "{\"inputs\": [[\"1\"]], \"outputs\": [\"2\"]}"}),
        ] {
            assert_eq!(read(fields.clone()), expected, "{fields}");
        }
        assert_eq!(read(json!({})), Ok(Vec::new()));
        for fields in [
            json!({"cases": 3}),
            json!({"cases": [{"input": "1"}]}),
            json!({"input_output": {"inputs": ["1"], "outputs": []}}),
        ] {
            assert!(read(fields.clone()).is_err(), "{fields}");
        }
    }
}
