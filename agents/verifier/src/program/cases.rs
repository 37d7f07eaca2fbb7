//! Test cases of a prompt: inputs and the expected outputs.

use serde_json::Value;

use crate::calls::VerifyItem;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TestCase {
    pub input: String,
    pub output: String,
}

/// Parses `cases` or `test_cases`, a list of `{"input", "output"}`, or `input_output` in the form
/// of APPS, with the lists `inputs` and `outputs`. A prompt without these fields has no cases. The
/// error describes the field that cannot be read.
pub(super) fn parse_cases(item: &VerifyItem) -> Result<Vec<TestCase>, String> {
    if let Some(value) = item.fields.get("input_output").and_then(parse_embedded) {
        return pair_lists(&value).ok_or_else(|| {
            "the prompt's field \"input_output\" has no lists \"inputs\" and \"outputs\" of texts \
             of the same length"
                .into()
        });
    }
    let named = ["cases", "test_cases"]
        .into_iter()
        .find_map(|name| item.fields.get(name).and_then(parse_embedded).map(|value| (name, value)));
    let Some((name, value)) = named else { return Ok(Vec::new()) };
    let wrong =
        || format!("the prompt's field {name:?} is not a list of {{\"input\", \"output\"}}");
    value.as_array().and_then(|list| list.iter().map(parse_case).collect()).ok_or_else(wrong)
}

/// Parses a field that some data sets store as JSON text.
fn parse_embedded(value: &Value) -> Option<Value> {
    match value {
        Value::Null => None,
        Value::String(text) => serde_json::from_str(text).ok().or_else(|| Some(value.clone())),
        other => Some(other.clone()),
    }
}

/// Accepts any of the known names of input and output.
fn parse_case(value: &Value) -> Option<TestCase> {
    let one_of = |names: &[&str]| names.iter().find_map(|name| value.get(name));
    let input = one_of(&["input", "stdin"]).map_or(Some(String::new()), join_text)?;
    let output = join_text(one_of(&["output", "stdout", "expected_output", "expected"])?)?;
    Some(TestCase { input, output })
}

fn pair_lists(value: &Value) -> Option<Vec<TestCase>> {
    let (inputs, outputs) = (value["inputs"].as_array()?, value["outputs"].as_array()?);
    if inputs.len() != outputs.len() {
        return None;
    }
    let case =
        |(input, output)| Some(TestCase { input: join_text(input)?, output: join_text(output)? });
    inputs.iter().zip(outputs).map(case).collect()
}

/// Accepts a text, a number, or lines to join.
fn join_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Array(lines) => {
            let lines: Option<Vec<String>> = lines.iter().map(join_text).collect();
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
        let found = parse_cases(&VerifyItem { fields, ..VerifyItem::example_item() })?;
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
