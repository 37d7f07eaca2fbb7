//! Decides whether the plain texts of a file are user messages.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The use of plain texts as messages: `true`, `false`, or `{system: "…"}`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(untagged, expecting = "expected true, false or {system: TEXT}")]
pub enum ChatSpec {
    /// `true`: plain texts are messages of a user. `false`: they are used as they are.
    Whether(bool),
    /// Plain texts are messages of a user, after a system message.
    With(ChatSettingsSpec),
}

/// The settings of chats.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChatSettingsSpec {
    /// System message before each text.
    #[schemars(example = "Answer in one line.")]
    pub system: Option<String>,
}

impl Default for ChatSpec {
    fn default() -> Self {
        Self::Whether(false)
    }
}

impl ChatSpec {
    /// Returns true if plain texts of a file become user messages; if false, they are used as they
    /// are.
    pub fn wraps_texts(&self) -> bool {
        !matches!(self, Self::Whether(false))
    }

    /// Returns the system message that precedes each wrapped text; `None` if none is set.
    pub fn system_message(&self) -> Option<&str> {
        match self {
            Self::Whether(_) => None,
            Self::With(settings) => settings.system.as_deref(),
        }
    }
}
