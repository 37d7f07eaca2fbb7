//! Tool calls a completion makes, against those its prompt names.

use serde_json::{Map, Value};

use crate::{
    calls::Item,
    judge::json::{document, same},
    opinion::Opinion,
};

/// Part of a pass's reward for calls that can be read, and for the right tools.
const READABLE: f64 = 0.25;
const RIGHT_TOOLS: f64 = 0.5;

#[derive(Debug, Clone)]
struct ToolCall {
    name: String,
    arguments: Value,
}

/// How calls are compared.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub ordered: bool,
    pub partial: bool,
}

impl Rules {
    pub(crate) fn judge(self, item: &Item) -> Opinion {
        let expected = match expected(item) {
            Ok(expected) => expected,
            Err(problem) => return Opinion::error(problem),
        };
        let made = match made(&item.completion) {
            Ok(made) => made,
            Err(problem) => return Opinion::fail(problem),
        };
        if self.fits(&made, &expected, |one, other| one == other) {
            return Opinion::pass();
        }
        let tools = self.fits(&made, &expected, |one, other| one.name == other.name);
        let reward = match (made.is_empty(), tools) {
            (true, _) => 0.0,
            (false, true) => RIGHT_TOOLS,
            (false, false) => READABLE,
        };
        let failed = Opinion::fail(told(&made, &expected, tools));
        if self.partial { failed.worth(reward) } else { failed }
    }

    /// Each call made is one expected, and the other way round.
    fn fits(
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
    /// `{"name", "arguments"}`, as OpenAI nests it in `function`, or with `parameters`. Arguments
    /// may be JSON in a string.
    fn read(value: &Value) -> Option<Self> {
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

    fn read_all(value: &Value) -> Option<Vec<Self>> {
        match value {
            Value::Array(calls) => calls.iter().map(Self::read).collect(),
            Value::Object(object) => match object.get("tool_calls") {
                Some(calls @ Value::Array(_)) => Self::read_all(calls),
                _ => Self::read(value).map(|call| vec![call]),
            },
            _ => None,
        }
    }
}

fn expected(item: &Item) -> Result<Vec<ToolCall>, String> {
    let field = item.fields.get("tool_calls").cloned();
    let answer = || item.answer.as_deref().and_then(|text| serde_json::from_str(text).ok());
    let value = field.or_else(answer).ok_or("the prompt has no field \"tool_calls\"")?;
    let value = match value {
        Value::String(text) => serde_json::from_str(&text).unwrap_or(Value::String(text)),
        other => other,
    };
    ToolCall::read_all(&value).ok_or_else(|| {
        "the prompt's field \"tool_calls\" is no list of {\"name\", \"arguments\"}".into()
    })
}

/// Calls between `<tool_call>` tags (Hermes, Qwen), or a JSON document of them. None is an answer
/// as well; one that cannot be read is not.
fn made(completion: &str) -> Result<Vec<ToolCall>, String> {
    let mut calls = Vec::new();
    let mut tagged = completion.split("<tool_call>").skip(1).peekable();
    if tagged.peek().is_some() {
        for part in tagged {
            let text = part.split("</tool_call>").next().unwrap_or_default();
            let call = serde_json::from_str(text.trim()).ok().as_ref().and_then(ToolCall::read_all);
            calls.extend(call.ok_or("a call that cannot be read")?);
        }
        return Ok(calls);
    }
    match document(completion) {
        Some(value) => ToolCall::read_all(&value).ok_or_else(|| "JSON that is no call".into()),
        None => Ok(calls),
    }
}

fn told(made: &[ToolCall], expected: &[ToolCall], tools: bool) -> String {
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
        self.name == other.name && same(&self.arguments, &other.arguments)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use wire::v1::verdicts::Outcome;

    use super::*;

    fn judge(rules: Rules, completion: &str, expected: Value) -> (Outcome, f64) {
        let mut fields = Map::new();
        fields.insert("tool_calls".into(), expected);
        let item = Item { completion: completion.into(), fields, ..Item::example() };
        let opinion = rules.judge(&item);
        (opinion.outcome, opinion.reward)
    }

    const ANY: Rules = Rules { ordered: false, partial: true };

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
            let strict = Rules { partial: false, ..ANY };
            assert_eq!(judge(strict, completion, expected.clone()), (Outcome::Fail, 0.0));
        }
    }

    #[test]
    fn order_counts_only_where_it_is_wanted_and_none_can_be_right() {
        let two = "[{\"name\": \"b\"}, {\"name\": \"a\"}]";
        let expected = json!([{"name": "a"}, {"name": "b"}]);
        assert_eq!(judge(ANY, two, expected.clone()).0, Outcome::Pass);
        let ordered = Rules { ordered: true, partial: false };
        assert_eq!(judge(ordered, two, expected).0, Outcome::Fail);
        assert_eq!(judge(ANY, "No tool is needed.", json!([])).0, Outcome::Pass);
        assert_eq!(judge(ANY, two, json!([])).0, Outcome::Fail);
        assert_eq!(judge(ANY, two, json!("x")).0, Outcome::Error);
    }
}
