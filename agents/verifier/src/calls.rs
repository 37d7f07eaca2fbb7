//! What the agent asks of its verifying worker.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use wire::v1;

/// Judge these completions.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Verify {
    pub verifier: v1::Verifier,
    pub items: Vec<Item>,
}

/// One completion and what its prompt says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Item {
    pub prompt_id: String,
    pub index: u32,
    pub prompt: String,
    pub completion: String,
    pub answer: Option<String>,
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

impl Item {
    /// One completion of a prompt.
    pub fn of(prompt: &wire::Prompt, index: u32, completion: String) -> Self {
        Self {
            prompt_id: prompt.id.clone(),
            index,
            prompt: prompt.prompt.clone(),
            completion,
            answer: prompt.answer.clone(),
            fields: prompt.fields.clone(),
        }
    }

    /// What the model was asked: where the prompt is a whole conversation, what the user said last.
    pub(crate) fn asked(&self) -> &str {
        self.text("plain_prompt").unwrap_or(&self.prompt)
    }

    /// A field that is text and not empty.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.fields.get(name).and_then(Value::as_str).filter(|text| !text.is_empty())
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Verified {
    pub verdicts: Vec<v1::verdicts::Verdict>,
    /// Why some are errors that another box may not make.
    pub trouble: Option<String>,
}

/// On the way.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Judged {
    pub items: u32,
}

/// Reads a value as each message in turn, for tests with hostile input.
#[doc(hidden)]
pub fn fuzz(value: &serde_json::Value) {
    // Whether it is one is of no interest.
    let _ = Verify::deserialize(value);
    let _ = Judged::deserialize(value);
    let _ = Verified::deserialize(value);
}

#[cfg(test)]
impl Item {
    pub(crate) fn example() -> Self {
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
