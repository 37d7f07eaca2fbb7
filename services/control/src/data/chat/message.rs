//! Messages of a conversation, as templates see them: fields in the order of the file.

use minijinja::{Value, context, value::ValueKind};

use super::ChatError;

pub(crate) type Message = Value;

pub(super) const ASSISTANT: &str = "assistant";

/// The conversation a prompt without one stands for.
pub(crate) fn wrapped(system: Option<&str>, prompt: &str) -> Vec<Message> {
    let say = |role: &str, content: &str| context! { role, content };
    let system = system.map(|text| say("system", text));
    system.into_iter().chain([say("user", prompt)]).collect()
}

/// What a model is to learn to say.
pub(crate) fn answer(text: &str) -> Message {
    context! { role => ASSISTANT, content => text }
}

/// What the last user said.
pub(crate) fn asked(messages: &[Message]) -> Option<String> {
    let user =
        messages.iter().rev().find(|message| field(message, "role").as_str() == Some("user"));
    text(&field(user?, "content"))
}

/// What a conversation asks: what its only user message says, whatever a system message adds, or all
/// of it.
pub(crate) fn said(messages: &[Message]) -> String {
    let is_system = |message: &&Message| field(message, "role").as_str() == Some("system");
    let mut others = messages.iter().filter(|message| !is_system(message));
    match (others.next(), others.next()) {
        (Some(only), None) if field(only, "role").as_str() == Some("user") => {
            text(&field(only, "content")).unwrap_or_default()
        }
        _ => serde_json::to_string(messages).unwrap_or_default(),
    }
}

/// Of messages that can be written.
pub(super) fn last_role(messages: &[Message]) -> Result<String, ChatError> {
    let mut last = None;
    for (index, message) in messages.iter().enumerate() {
        let wrong = |what| ChatError::Message { number: index + 1, what };
        if message.kind() != ValueKind::Map {
            return Err(wrong("expected an object with \"role\" and \"content\""));
        }
        let role = field(message, "role");
        last = Some(role.as_str().ok_or_else(|| wrong("there is no \"role\""))?.to_owned());
        let content = field(message, "content");
        let silent = content.is_undefined() || content.is_none();
        let calls = !field(message, "tool_calls").is_undefined();
        if text(&content).is_none() && !(silent && calls) {
            return Err(wrong("\"content\" must be a text, or a list of parts that are texts"));
        }
    }
    last.ok_or(ChatError::Shape)
}

/// A message whose content is one text.
pub(super) fn plain(message: &Message) -> Message {
    let content = field(message, "content");
    match text(&content) {
        Some(text) if content.kind() == ValueKind::Seq => {
            let pairs = message.try_iter().into_iter().flatten().map(|name| {
                let is_content = name.as_str() == Some("content");
                let value = message.get_item(&name).unwrap_or(Value::UNDEFINED);
                (name, if is_content { Value::from(&text) } else { value })
            });
            Value::from_pairs(pairs)
        }
        _ => message.clone(),
    }
}

/// A text, or the texts of which it is made.
fn text(content: &Value) -> Option<String> {
    if let Some(text) = content.as_str() {
        return Some(text.to_owned());
    }
    if content.kind() != ValueKind::Seq {
        return None;
    }
    let part = |part: Value| match field(&part, "type").as_str() {
        Some("text") => field(&part, "text").as_str().map(str::to_owned),
        _ => None,
    };
    content.try_iter().ok()?.map(part).collect()
}

fn field(message: &Value, name: &str) -> Value {
    message.get_attr(name).unwrap_or(Value::UNDEFINED)
}
