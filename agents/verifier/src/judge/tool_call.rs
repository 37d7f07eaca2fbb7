//! Tool calls of a completion, compared with those that its prompt expects.

use serde_json::{Map, Value};

use crate::{
    calls::VerifyItem,
    judge::json::{find_document, json_equal},
    judge_result::JudgeResult,
};

/// For readable calls of wrong tools.
const READABLE_REWARD: f64 = 0.25;
/// For the right tools with wrong arguments.
const RIGHT_TOOLS_REWARD: f64 = 0.5;

/// Compared by name and by JSON equality of the arguments.
#[derive(Debug, Clone)]
struct ToolCall {
    name: String,
    arguments: Value,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct ToolCallRules {
    pub ordered: bool,
    pub partial: bool,
}

impl ToolCallRules {
    pub(crate) fn judge_item(self, item: &VerifyItem) -> JudgeResult {
        let expected = match expected_calls(item) {
            Ok(expected) => expected,
            Err(problem) => return JudgeResult::input_error(problem),
        };
        let made = match find_calls(&item.completion) {
            Ok(made) => made,
            Err(problem) => return JudgeResult::failed_because(problem),
        };
        if self.calls_match(&made, &expected, |one, other| one == other) {
            return JudgeResult::full_pass();
        }
        let tools = self.calls_match(&made, &expected, |one, other| one.name == other.name);
        let reward = match (made.is_empty(), tools) {
            (true, _) => 0.0,
            (false, true) => RIGHT_TOOLS_REWARD,
            (false, false) => READABLE_REWARD,
        };
        let failed = JudgeResult::failed_because(describe_mismatch(&made, &expected, tools));
        if self.partial { failed.with_reward(reward) } else { failed }
    }

    /// Returns true if each call matches a different expected call and none is left, in order if
    /// the settings require it.
    fn calls_match(
        self,
        made: &[ToolCall],
        expected: &[ToolCall],
        fit: impl Fn(&ToolCall, &ToolCall) -> bool,
    ) -> bool {
        if made.len() != expected.len() {
            return false;
        }
        if self.ordered {
            return made.iter().zip(expected).all(|(one, other)| fit(one, other));
        }
        let mut left: Vec<&ToolCall> = expected.iter().collect();
        made.iter().all(|call| {
            let place = left.iter().position(|other| fit(call, other));
            place.map(|place| left.swap_remove(place)).is_some()
        })
    }
}

impl ToolCall {
    /// Parses `{"name", "arguments"}`, the OpenAI form that nests it in `function`, or the form
    /// with `parameters`. Arguments may be JSON in a string.
    fn parse_call(value: &Value) -> Option<Self> {
        let object = value.as_object()?;
        let object = object.get("function").and_then(Value::as_object).unwrap_or(object);
        let name = object.get("name").and_then(Value::as_str)?.to_owned();
        let arguments = object.get("arguments").or_else(|| object.get("parameters"));
        let arguments = match arguments {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(Value::String(text)) => serde_json::from_str(text).ok()?,
            Some(other) => other.clone(),
        };
        Some(Self { name, arguments })
    }

    /// Parses one call, a list of calls, or an object with `tool_calls`.
    fn parse_calls(value: &Value) -> Option<Vec<Self>> {
        match value {
            Value::Array(calls) => calls.iter().map(Self::parse_call).collect(),
            Value::Object(object) => match object.get("tool_calls") {
                Some(calls @ Value::Array(_)) => Self::parse_calls(calls),
                _ => Self::parse_call(value).map(|call| vec![call]),
            },
            _ => None,
        }
    }
}

/// Reads the prompt's field `tool_calls` or its answer.
fn expected_calls(item: &VerifyItem) -> Result<Vec<ToolCall>, String> {
    let field = item.fields.get("tool_calls").cloned();
    let answer = || item.answer.as_deref().and_then(|text| serde_json::from_str(text).ok());
    let value = field.or_else(answer).ok_or("the prompt has no field \"tool_calls\"")?;
    let value = match value {
        Value::String(text) => serde_json::from_str(&text).unwrap_or(Value::String(text)),
        other => other,
    };
    ToolCall::parse_calls(&value).ok_or_else(|| {
        "the prompt's field \"tool_calls\" is not a list of {\"name\", \"arguments\"}".into()
    })
}

/// Finds calls between `<tool_call>` tags (Hermes, Qwen) or in a JSON document, possibly none.
/// Fails if one cannot be read.
fn find_calls(completion: &str) -> Result<Vec<ToolCall>, String> {
    let mut calls = Vec::new();
    let mut tagged = completion.split("<tool_call>").skip(1).peekable();
    if tagged.peek().is_some() {
        for part in tagged {
            let text = part.split("</tool_call>").next().unwrap_or_default();
            let call =
                serde_json::from_str(text.trim()).ok().as_ref().and_then(ToolCall::parse_calls);
            calls.extend(call.ok_or("a call that cannot be read")?);
        }
        return Ok(calls);
    }
    match find_document(completion) {
        Some(value) => {
            ToolCall::parse_calls(&value).ok_or_else(|| "JSON that is not a call".into())
        }
        None => Ok(calls),
    }
}

fn describe_mismatch(made: &[ToolCall], expected: &[ToolCall], tools: bool) -> String {
    let names = |calls: &[ToolCall]| {
        let names: Vec<&str> = calls.iter().map(|call| call.name.as_str()).collect();
        if names.is_empty() { "no tool".to_owned() } else { names.join(", ") }
    };
    if tools {
        let differs = |call: &&ToolCall| !expected.contains(call);
        let call = made.iter().find(differs).map(|call| call.arguments.to_string());
        return format!("the right tools with other arguments: {}", call.unwrap_or_default());
    }
    format!("called {}, expected {}", names(made), names(expected))
}

impl PartialEq for ToolCall {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && json_equal(&self.arguments, &other.arguments)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use wire::v1::verdicts::Outcome;

    use super::*;

    fn judge(rules: ToolCallRules, completion: &str, expected: Value) -> (Outcome, f64) {
        let mut fields = Map::new();
        fields.insert("tool_calls".into(), expected);
        let item =
            VerifyItem { completion: completion.into(), fields, ..VerifyItem::example_item() };
        let result = rules.judge_item(&item);
        (result.outcome, result.reward)
    }

    const ANY: ToolCallRules = ToolCallRules { ordered: false, partial: true };

    #[test]
    fn calls_are_read_in_each_of_their_forms() {
        let expected = json!([{"name": "add", "arguments": {"a": 1, "b": 2}}]);
        for completion in [
            "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 2, \"a\": 1.0}}\n</tool_call>",
            "{\"name\": \"add\", \"parameters\": {\"a\": 1, \"b\": 2}}",
            "Sure.\n```json\n[{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": 2}}]\n```",
            r#"{"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{\"a\": 1, \"b\": 2}"}}]}"#,
        ] {
            assert_eq!(judge(ANY, completion, expected.clone()), (Outcome::Pass, 1.0));
        }
    }

    #[test]
    fn what_is_nearly_right_is_worth_a_part_if_that_is_wanted() {
        let expected = json!([{"name": "add", "arguments": {"a": 1}}]);
        let cases = [
            ("{\"name\": \"add\", \"arguments\": {\"a\": 2}}", 0.5),
            ("{\"name\": \"sub\", \"arguments\": {\"a\": 1}}", 0.25),
            ("I would add them.", 0.0),
            ("<tool_call>{\"name\": </tool_call>", 0.0),
        ];
        for (completion, reward) in cases {
            assert_eq!(judge(ANY, completion, expected.clone()), (Outcome::Fail, reward));
            let strict = ToolCallRules { partial: false, ..ANY };
            assert_eq!(judge(strict, completion, expected.clone()), (Outcome::Fail, 0.0));
        }
    }

    #[test]
    fn order_counts_only_where_it_is_wanted_and_none_can_be_right() {
        let two = "[{\"name\": \"b\"}, {\"name\": \"a\"}]";
        let expected = json!([{"name": "a"}, {"name": "b"}]);
        assert_eq!(judge(ANY, two, expected.clone()).0, Outcome::Pass);
        let ordered = ToolCallRules { ordered: true, partial: false };
        assert_eq!(judge(ordered, two, expected).0, Outcome::Fail);
        assert_eq!(judge(ANY, "No tool is needed.", json!([])).0, Outcome::Pass);
        assert_eq!(judge(ANY, two, json!([])).0, Outcome::Fail);
        assert_eq!(judge(ANY, two, json!("x")).0, Outcome::Error);
    }
}
