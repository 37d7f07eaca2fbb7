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
pub(crate) struct Item {
    pub prompt_id: String,
    pub index: u32,
    pub prompt: String,
    pub completion: String,
    pub answer: Option<String>,
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Verified {
    pub verdicts: Vec<v1::verdicts::Verdict>,
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
