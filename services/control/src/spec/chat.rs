//! Whether texts of a file are said by a user.

use serde::Deserialize;

/// `true`, `false`, or `{system: "…"}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected true, false or {system: TEXT}")]
pub enum ChatSpec {
    Whether(bool),
    With(SettingsSpec),
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SettingsSpec {
    pub system: Option<String>,
}

impl Default for ChatSpec {
    fn default() -> Self {
        Self::Whether(false)
    }
}

impl ChatSpec {
    pub(crate) fn wraps(&self) -> bool {
        !matches!(self, Self::Whether(false))
    }

    pub(crate) fn system(&self) -> Option<&str> {
        match self {
            Self::Whether(_) => None,
            Self::With(settings) => settings.system.as_deref(),
        }
    }
}
