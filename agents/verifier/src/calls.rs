//! The messages between the agent and its verifying worker.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use wire::v1;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct VerifyRequest {
    pub verifier: v1::Verifier,
    pub items: Vec<VerifyItem>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VerifyItem {
    pub prompt_id: String,
    pub index: u32,
    pub prompt: String,
    pub completion: String,
    pub answer: Option<String>,
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

impl VerifyItem {
    /// Builds the item of one completion of a prompt.
    pub fn from_prompt(prompt: &wire::PromptEntry, index: u32, completion: String) -> Self {
        Self {
            prompt_id: prompt.id.clone(),
            index,
            prompt: prompt.prompt.clone(),
            completion,
            answer: prompt.answer.clone(),
            fields: prompt.fields.clone(),
        }
    }

    /// Returns the field `plain_prompt`, the question without the chat template, otherwise the
    /// prompt.
    pub(crate) fn question_text(&self) -> &str {
        self.text_field("plain_prompt").unwrap_or(&self.prompt)
    }

    pub(crate) fn text_field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).and_then(Value::as_str).filter(|text| !text.is_empty())
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct VerifyReply {
    pub verdicts: Vec<v1::verdicts::Verdict>,
    /// The reason for errors that another host may not produce.
    pub trouble: Option<String>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct VerifyProgress {
    pub items: u32,
}

/// Parses a value as each message in turn, for tests with hostile input.
#[doc(hidden)]
pub fn fuzz_messages(value: &serde_json::Value) {
    // Only panics matter; the parsed messages are dropped.
    let _ = VerifyRequest::deserialize(value);
    let _ = VerifyProgress::deserialize(value);
    let _ = VerifyReply::deserialize(value);
}

#[cfg(test)]
impl VerifyItem {
    pub(crate) fn example_item() -> Self {
        Self {
            prompt_id: "p".into(),
            index: 0,
            prompt: String::new(),
            completion: String::new(),
            answer: None,
            fields: Map::new(),
        }
    }
}
