//! The messages between the agent and its verifying worker.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use wire::v1;

use crate::episode::{ActionRequest, PlayedEpisode};

/// A call to the worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum VerifierCall {
    Verify(VerifyRequest),
    Act(ActRequest),
}

/// A request for an environment's answer to an action.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ActRequest {
    pub environment: v1::verifier::Environment,
    pub request: ActionRequest,
}

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
    /// The turns of the completion, if an environment judges it.
    #[serde(rename = "$episode", default, skip_serializing_if = "Option::is_none")]
    pub episode: Option<PlayedEpisode>,
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

/// Names in the JSON of an item that no field of a prompt may replace.
const ITEM_NAMES: [&str; 6] = ["prompt_id", "index", "prompt", "completion", "answer", "$episode"];

impl VerifyItem {
    /// Builds the item of one completion of a prompt. Fields of the prompt that are named as those
    /// of an item, such as the `completion` of a training example, are left out.
    pub fn from_prompt(prompt: &wire::PromptEntry, index: u32, completion: String) -> Self {
        let mut fields = prompt.fields.clone();
        fields.retain(|name, _| !ITEM_NAMES.contains(&name.as_str()));
        Self {
            prompt_id: prompt.id.clone(),
            index,
            prompt: prompt.prompt.clone(),
            completion,
            answer: prompt.answer.clone(),
            episode: None,
            fields,
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
    /// True if the verifier's server or executable is not there, so that the job was not finished.
    pub is_unreachable: bool,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct VerifyProgress {
    pub items: u32,
}

/// Parses a value as each message in turn, for tests with hostile input.
#[doc(hidden)]
pub fn fuzz_messages(value: &serde_json::Value) {
    // Only panics matter; the parsed messages are dropped.
    let _ = VerifierCall::deserialize(value);
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
            episode: None,
            fields: Map::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_s_own_completion_does_not_replace_the_judged_one() {
        let line = br#"{"id": "a", "prompt": "1+1=", "completion": "2", "answer": "2", "tier": 1}"#;
        let prompt = wire::PromptEntry::parse_all(line).unwrap().remove(0);
        let item = VerifyItem::from_prompt(&prompt, 3, "11".into());
        let json = serde_json::to_string(&item).unwrap();
        assert_eq!(serde_json::from_str::<VerifyItem>(&json).unwrap(), item, "{json}");
        assert_eq!((item.completion.as_str(), item.fields.len()), ("11", 1));
    }
}
