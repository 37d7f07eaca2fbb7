//! The messages of a conversation as templates see them. Fields keep the order of the file.

use minijinja::{Value, context, value::ValueKind};

use super::ChatError;

/// A map with `role`, `content` and possibly other fields.
pub type ChatMessage = Value;

pub(crate) const ASSISTANT_ROLE: &str = "assistant";

/// Returns the conversation of one question, after a system message if one is given.
pub fn wrap_prompt(system: Option<&str>, prompt: &str) -> Vec<ChatMessage> {
    let say = |role: &str, content: &str| context! { role, content };
    let system = system.map(|text| say("system", text));
    system.into_iter().chain([say("user", prompt)]).collect()
}

/// Returns the message of a model's answer.
pub fn assistant_message(text: &str) -> ChatMessage {
    context! { role => ASSISTANT_ROLE, content => text }
}

/// Returns the text of the last message of a user.
pub fn last_user_text(messages: &[ChatMessage]) -> Option<String> {
    let user =
        messages.iter().rev().find(|message| get_field(message, "role").as_str() == Some("user"));
    content_text(&get_field(user?, "content"))
}

/// Returns the text that identifies a conversation's question: that of its only user message,
/// without the system message, or the whole conversation as JSON if it has several messages.
pub fn question_text(messages: &[ChatMessage]) -> String {
    let is_system = |message: &&ChatMessage| get_field(message, "role").as_str() == Some("system");
    let mut others = messages.iter().filter(|message| !is_system(message));
    match (others.next(), others.next()) {
        (Some(only), None) if get_field(only, "role").as_str() == Some("user") => {
            content_text(&get_field(only, "content")).unwrap_or_default()
        }
        _ => serde_json::to_string(messages).unwrap_or_default(),
    }
}

/// Returns the messages of a value that is a list.
pub fn list_messages(messages: ChatMessage) -> Option<Vec<ChatMessage>> {
    (messages.kind() == ValueKind::Seq).then(|| messages.try_iter().into_iter().flatten().collect())
}

/// Returns the role of the last message. Fails if the list is empty, or a message has no role or no
/// text content; one with `tool_calls` needs no content.
pub(crate) fn check_messages(messages: &[ChatMessage]) -> Result<String, ChatError> {
    let mut last = None;
    for (index, message) in messages.iter().enumerate() {
        let wrong = |what| ChatError::Message { number: index + 1, what };
        if message.kind() != ValueKind::Map {
            return Err(wrong("expected an object with \"role\" and \"content\""));
        }
        let role = get_field(message, "role");
        last = Some(role.as_str().ok_or_else(|| wrong("there is no \"role\""))?.to_owned());
        let content = get_field(message, "content");
        let silent = content.is_undefined() || content.is_none();
        let calls = !get_field(message, "tool_calls").is_undefined();
        if content_text(&content).is_none() && !(silent && calls) {
            return Err(wrong("\"content\" must be a text, or a list of parts that are texts"));
        }
    }
    last.ok_or(ChatError::Shape)
}

pub(crate) fn flatten_content(message: &ChatMessage) -> ChatMessage {
    let content = get_field(message, "content");
    match content_text(&content) {
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

/// Concatenates a list of text parts. Returns `None` for other parts.
fn content_text(content: &Value) -> Option<String> {
    if let Some(text) = content.as_str() {
        return Some(text.to_owned());
    }
    if content.kind() != ValueKind::Seq {
        return None;
    }
    let part = |part: Value| match get_field(&part, "type").as_str() {
        Some("text") => get_field(&part, "text").as_str().map(str::to_owned),
        _ => None,
    };
    content.try_iter().ok()?.map(part).collect()
}

fn get_field(message: &Value, name: &str) -> Value {
    message.get_attr(name).unwrap_or(Value::UNDEFINED)
}
