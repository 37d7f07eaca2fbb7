//! The shapes in which people have prompts, examples and pairs, and their fields in a run.

use serde_json::{Map, Value, json};
use wire::RowPlace;

use crate::error::DataFileError;

/// The use of a file's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataPurpose {
    /// Prompts to sample from. A reference answer becomes the field `answer`.
    Prompts,
    /// Examples to learn.
    Examples,
}

/// The shape of a row, by the fields it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RowShape {
    Prompt,
    PromptCompletion,
    Text,
    Messages,
    /// `instruction`, `input` and `output`, as in the data of Stanford's Alpaca.
    Alpaca,
    /// `conversations` of `from` and `value`, as exported by ShareGPT.
    ShareGpt,
    /// `prompt`, `chosen` and `rejected`, as in TRL; the prompt may be in both answers.
    Preference,
}

/// The result of a conversion: true if the row has changed, or the problem with a column.
type Conversion = Result<bool, (&'static str, String)>;

impl RowShape {
    /// Returns the name of the shape in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::PromptCompletion => "prompt/completion",
            Self::Text => "text",
            Self::Messages => "messages",
            Self::Alpaca => "alpaca",
            Self::ShareGpt => "sharegpt",
            Self::Preference => "prompt/chosen/rejected",
        }
    }

    /// Returns the shape of a row; `None` if it has no known fields. Fields of a run come first.
    pub(crate) fn recognise(row: &Map<String, Value>) -> Option<Self> {
        let has = |name: &str| row.get(name).is_some_and(|value| !value.is_null());
        Some(if has("completion") || (has("prompt") && has("response")) {
            Self::PromptCompletion
        } else if has("chosen") && has("rejected") {
            Self::Preference
        } else if has("messages") {
            Self::Messages
        } else if has("prompt") {
            Self::Prompt
        } else if has("conversations") || has("conversation") {
            Self::ShareGpt
        } else if has("instruction") && (has("output") || !has("text")) {
            Self::Alpaca
        } else if has("text") {
            Self::Text
        } else {
            return None;
        })
    }

    /// Gives the row the fields of a prompt or an example. Returns false if it had them.
    pub(crate) fn convert_row(
        self,
        row: &mut Map<String, Value>,
        place: RowPlace,
        purpose: DataPurpose,
    ) -> Result<bool, DataFileError> {
        let converted = match (self, purpose) {
            (Self::Alpaca, _) => convert_alpaca(row, purpose),
            (Self::ShareGpt, _) => convert_sharegpt(row, purpose),
            (Self::Preference, DataPurpose::Examples) => learn_chosen(row),
            (Self::Preference, DataPurpose::Prompts) => Ok(ask_prompt_of_pair(row)),
            (Self::Messages, DataPurpose::Prompts) => Ok(split_answer(row)),
            (Self::Messages | Self::Prompt | Self::PromptCompletion | Self::Text, _) => Ok(false),
        };
        converted.map_err(|(column, problem)| {
            let column = column.to_owned();
            DataFileError::Column { place, column, problem }
        })
    }
}

/// Removes a field and returns its text; empty if it is absent.
fn take_text(
    row: &mut Map<String, Value>,
    column: &'static str,
) -> Result<String, (&'static str, String)> {
    match row.remove(column) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err((column, "must be a text".to_owned())),
    }
}

/// Sets the answer that verifiers compare with, unless the row has one.
fn set_answer(row: &mut Map<String, Value>, answer: &str) -> bool {
    let is_new = row.get("answer").is_none_or(Value::is_null) && !answer.is_empty();
    if is_new {
        row.insert("answer".into(), answer.into());
    }
    is_new
}

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

/// Joins the instruction and its input by a blank line.
fn convert_alpaca(row: &mut Map<String, Value>, purpose: DataPurpose) -> Conversion {
    if row.get("history").is_some_and(|it| !it.is_null() && *it != json!([])) {
        return Err(("history", "earlier turns are not read; write \"messages\"".to_owned()));
    }
    let (instruction, input) = (take_text(row, "instruction")?, take_text(row, "input")?);
    if purpose == DataPurpose::Examples && row.get("output").is_none_or(Value::is_null) {
        let problem = "is missing; name its column, as in `--column output=response` or \
                       columns: { output: response }";
        return Err(("output", problem.to_owned()));
    }
    let (output, system) = (take_text(row, "output")?, take_text(row, "system")?);
    let parts = [instruction, input].into_iter().filter(|text| !text.is_empty());
    let prompt = parts.collect::<Vec<_>>().join("\n\n");
    let is_chat = !system.is_empty();
    let prompt = match is_chat {
        true => json!([message("system", &system), message("user", &prompt)]),
        false => prompt.into(),
    };
    row.insert("prompt".into(), prompt);
    match purpose {
        DataPurpose::Prompts => {
            set_answer(row, &output);
        }
        DataPurpose::Examples if is_chat => {
            row.insert("completion".into(), json!([message("assistant", &output)]));
        }
        DataPurpose::Examples => drop(row.insert("completion".into(), output.into())),
    }
    Ok(true)
}

/// Renames the parts of a conversation and its roles.
fn convert_sharegpt(row: &mut Map<String, Value>, purpose: DataPurpose) -> Conversion {
    const COLUMNS: [&str; 2] = ["conversations", "conversation"];
    let has = |name: &&str| row.get(*name).is_some_and(|turns| !turns.is_null());
    let column = COLUMNS.into_iter().find(has).unwrap_or(COLUMNS[0]);
    let Some(Value::Array(turns)) = row.remove(column) else {
        let problem = "must be a list such as [{\"from\": \"human\", \"value\": \"2+2=\"}]";
        return Err((column, problem.to_owned()));
    };
    let system = take_text(row, "system")?;
    let mut messages: Vec<Value> = Vec::new();
    if !system.is_empty() {
        messages.push(message("system", &system));
    }
    for (index, turn) in turns.into_iter().enumerate() {
        let converted = convert_turn(turn);
        let problem = |what: String| (column, format!("turn {}: {what}", index + 1));
        messages.push(converted.map_err(problem)?);
    }
    row.insert("messages".into(), messages.into());
    if purpose == DataPurpose::Prompts {
        split_answer(row);
    }
    Ok(true)
}

fn convert_turn(turn: Value) -> Result<Value, String> {
    if turn.get("role").is_some() {
        return Ok(turn);
    }
    let text = |name: &str| turn.get(name).and_then(Value::as_str);
    let (Some(from), Some(value)) = (text("from"), text("value")) else {
        return Err("it needs the texts \"from\" and \"value\"".to_owned());
    };
    let role = match from {
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "model" => "assistant",
        "system" => "system",
        "tool" | "observation" => "tool",
        other => {
            let other: String = other.chars().take(60).collect();
            return Err(format!(
                "\"from\" is {other:?}; known are human, gpt, system and tool, and their names in \
                 \"messages\""
            ));
        }
    };
    Ok(message(role, value))
}

/// Moves the assistant's text at the end of a conversation to the answer. A prompt beside it comes
/// first.
fn split_answer(row: &mut Map<String, Value>) -> bool {
    let has = |name: &str| row.get(name).is_some_and(|value| !value.is_null());
    if has("prompt") || has("text") {
        return false;
    }
    let Some(Value::Array(messages)) = row.get_mut("messages") else { return false };
    let answer = messages.last().and_then(answer_text).map(str::to_owned);
    let Some(answer) = answer else { return false };
    messages.pop();
    set_answer(row, &answer);
    true
}

/// Returns the text of an assistant's message.
fn answer_text(message: &Value) -> Option<&str> {
    let is_answer = message.get("role").and_then(Value::as_str) == Some("assistant");
    message.get("content").and_then(Value::as_str).filter(|_| is_answer)
}

/// Makes the chosen answer the completion. A chosen conversation that is more than an answer
/// contains its prompt, or continues it.
fn learn_chosen(row: &mut Map<String, Value>) -> Conversion {
    row.remove("rejected");
    let chosen = row.remove("chosen").unwrap_or_default();
    let prompt = row.remove("prompt").filter(|prompt| !prompt.is_null());
    match (chosen, prompt) {
        (Value::Array(messages), prompt) if !is_answer_alone(&messages) => {
            let mut before = prompt.as_ref().and_then(Value::as_array).cloned().unwrap_or_default();
            if messages.starts_with(&before) {
                before.clear();
            }
            row.insert("messages".into(), [before, messages].concat().into());
        }
        (_, None) => {
            let problem = "needs \"prompt\" beside it, or must be a list of messages";
            return Err(("chosen", problem.to_owned()));
        }
        (chosen, Some(Value::String(text))) if chosen.is_array() => {
            row.insert("prompt".into(), json!([message("user", &text)]));
            row.insert("completion".into(), chosen);
        }
        (chosen, Some(prompt)) => {
            row.insert("prompt".into(), prompt);
            row.insert("completion".into(), chosen);
        }
    }
    Ok(true)
}

fn is_answer_alone(messages: &[Value]) -> bool {
    let role = messages.first().and_then(|message| message.get("role")).and_then(Value::as_str);
    messages.len() == 1 && role == Some("assistant")
}

/// Takes the prompt and the chosen answer of a pair. Both answers stay for verifiers.
fn ask_prompt_of_pair(row: &mut Map<String, Value>) -> bool {
    let last = |chosen: &Value| match chosen {
        Value::String(text) => Some(text.clone()),
        chosen => chosen.as_array()?.last().and_then(answer_text).map(str::to_owned),
    };
    let answer = row.get("chosen").and_then(last).unwrap_or_default();
    let is_changed = set_answer(row, &answer);
    let has_prompt = ["prompt", "messages"]
        .iter()
        .any(|name| row.get(*name).is_some_and(|value| !value.is_null()));
    let Some(Value::Array(messages)) = row.get("chosen").filter(|_| !has_prompt) else {
        return is_changed;
    };
    let before = messages.len().saturating_sub(1);
    row.insert("prompt".into(), messages[..before].into());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(row: &Value, purpose: DataPurpose) -> Result<Value, String> {
        let mut row = row.as_object().unwrap().clone();
        let shape = RowShape::recognise(&row).unwrap();
        let changed = shape.convert_row(&mut row, RowPlace::Row(3), purpose);
        changed.map(|_| Value::Object(row)).map_err(|error| error.to_string())
    }

    /// The columns `from` and `value` of ShareGPT.
    fn turn(from: &str, value: &str) -> Value {
        json!({ "from": from, "value": value })
    }

    #[test]
    fn each_shape_becomes_an_example_and_a_prompt_with_its_answer() {
        let user = message("user", "2+2=");
        let (right, wrong) = (message("assistant", "4"), message("assistant", "5"));
        let conversation = json!([user, right]);
        for (row, example, prompt) in [
            (
                json!({"instruction": "Add.", "input": "2+2", "output": "4", "level": 1}),
                json!({"prompt": "Add.\n\n2+2", "completion": "4", "level": 1}),
                json!({"prompt": "Add.\n\n2+2", "answer": "4", "level": 1}),
            ),
            (
                json!({"instruction": "2+2=", "input": "", "output": "4", "system": "Short."}),
                json!({"prompt": [message("system", "Short."), user], "completion": [right]}),
                json!({"prompt": [message("system", "Short."), user], "answer": "4"}),
            ),
            (
                json!({"conversations": [turn("human", "2+2="), turn("gpt", "4")], "system": "S"}),
                json!({"messages": [message("system", "S"), user, right]}),
                json!({"messages": [message("system", "S"), user], "answer": "4"}),
            ),
            (
                json!({"conversations": null, "conversation": [turn("human", "2+2=")]}),
                json!({"conversations": null, "messages": [user]}),
                json!({"conversations": null, "messages": [user]}),
            ),
            (
                json!({"messages": conversation}),
                json!({"messages": conversation}),
                json!({"messages": [user], "answer": "4"}),
            ),
            (
                json!({"prompt": "2+2=", "chosen": "4", "rejected": "5"}),
                json!({"prompt": "2+2=", "completion": "4"}),
                json!({"prompt": "2+2=", "chosen": "4", "rejected": "5", "answer": "4"}),
            ),
            (
                json!({"prompt": [user], "chosen": [right], "rejected": [wrong]}),
                json!({"prompt": [user], "completion": [right]}),
                json!({"prompt": [user], "chosen": [right], "rejected": [wrong], "answer": "4"}),
            ),
            (
                json!({"prompt": "2+2=", "chosen": [right], "rejected": [wrong]}),
                json!({"prompt": [user], "completion": [right]}),
                json!({"prompt": "2+2=", "chosen": [right], "rejected": [wrong], "answer": "4"}),
            ),
            (
                json!({"chosen": conversation, "rejected": [user, wrong]}),
                json!({"messages": conversation}),
                json!({"chosen": conversation, "rejected": [user, wrong], "prompt": [user],
                       "answer": "4"}),
            ),
        ] {
            assert_eq!(convert(&row, DataPurpose::Examples).unwrap(), example, "{row}");
            assert_eq!(convert(&row, DataPurpose::Prompts).unwrap(), prompt, "{row}");
        }
    }

    #[test]
    fn rows_with_the_fields_of_a_run_stay_as_they_are() {
        for row in [
            json!({"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}),
            json!({"prompt": "a", "answer": "b", "instruction": "c", "messages": [1]}),
            json!({"text": "a", "instruction": "b"}),
            json!({"completion": "a", "prompt": null}),
        ] {
            assert_eq!(convert(&row, DataPurpose::Examples), Ok(row.clone()));
            assert_eq!(convert(&row, DataPurpose::Prompts), Ok(row));
        }
        assert_eq!(RowShape::recognise(json!({"question": "a"}).as_object().unwrap()), None);
    }

    #[test]
    fn a_row_that_cannot_be_used_is_named_with_its_column() {
        for (row, words) in [
            (json!({"instruction": 1, "output": "a"}), "column \"instruction\": must be a text"),
            (json!({"instruction": "a", "history": [["b", "c"]]}), "column \"history\""),
            (
                json!({"instruction": "a", "context": "b", "response": "c"}),
                "column \"output\": is missing; name its column",
            ),
            (json!({"conversations": "a"}), "column \"conversations\": must be a list"),
            (json!({"conversations": [turn("human", "a"), 7]}), "turn 2: it needs the texts"),
            (json!({"conversations": [turn("bob", "a")]}), "\"from\" is \"bob\""),
            (json!({"chosen": "a", "rejected": "b"}), "column \"chosen\": needs \"prompt\""),
        ] {
            let error = convert(&row, DataPurpose::Examples).unwrap_err();
            assert!(error.starts_with("row 3, column") && error.contains(words), "{error}");
        }
    }
}
