//! An executable that plays turns with a model and rewards the episode.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1::verifier::Environment;

use super::program_verifiers::{check_executable, ten_seconds};
use crate::field_checks::{FieldResult, check_count, check_range};

const TURNS_MAX: u32 = 64;
const PASS_AT_MAX: f64 = 1e6;

/// An executable that answers the model's turns with observations, and rewards the episode. It runs
/// where samples are drawn and where they are judged, in a sandbox unless the host's owner allows it
/// to run outside. Not in a chain.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentSpec {
    /// The executable and its arguments.
    #[schemars(length(min = 1))]
    pub argv: Vec<String>,
    /// Seconds to wait for an answer.
    #[schemars(range(min = 0.01, max = 3600.0))]
    #[serde(default = "ten_seconds")]
    pub timeout_s: f64,
    /// Absolute paths that the executable reads besides the system directories and its own
    /// directory. The host's owner must grant them.
    #[schemars(length(max = 32), inner(regex(pattern = "^/")))]
    #[serde(default)]
    pub paths: Vec<String>,
    /// Largest number of turns of the model in an episode.
    #[schemars(range(min = 1, max = 64))]
    #[serde(default = "eight")]
    pub max_turns: u32,
    /// Least sum of the rewards of a passing episode.
    #[schemars(range(min = -1e6, max = 1e6))]
    #[serde(default = "half")]
    pub pass_at: f64,
    /// The role of the messages with observations, if the prompts are conversations.
    #[serde(default)]
    pub role: ObservationRoleSpec,
}

/// The roles of observations in a conversation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ObservationRoleSpec {
    /// The result of a tool.
    #[default]
    Tool,
    /// A message of the user, for chat templates that know no tools.
    User,
}

impl ObservationRoleSpec {
    /// Returns the role's name in a message.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tool => "tool",
            Self::User => "user",
        }
    }
}

fn eight() -> u32 {
    8
}

fn half() -> f64 {
    0.5
}

impl EnvironmentSpec {
    pub(super) fn check_fields(&self, field: &str) -> FieldResult {
        check_executable(field, &self.argv, self.timeout_s, &self.paths)?;
        check_count(&format!("{field}.max_turns"), self.max_turns, 1, TURNS_MAX)?;
        check_range(&format!("{field}.pass_at"), self.pass_at, -PASS_AT_MAX, PASS_AT_MAX)
    }
}

/// The texts around observations follow from the base's chat template.
impl From<&EnvironmentSpec> for Environment {
    fn from(spec: &EnvironmentSpec) -> Self {
        let EnvironmentSpec { argv, timeout_s, paths, max_turns, pass_at, role: _ } = spec.clone();
        Self { argv, timeout_s, paths, max_turns, pass_at, ..Self::default() }
    }
}
