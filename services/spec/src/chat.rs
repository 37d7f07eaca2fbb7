//! Decides whether the plain texts of a file are user messages.

use serde::Deserialize;

/// The chat settings: `true`, `false`, or `{system: "…"}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected true, false or {system: TEXT}")]
pub enum ChatSpec {
    Whether(bool),
    With(ChatSettingsSpec),
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatSettingsSpec {
    /// Set before each wrapped text.
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
