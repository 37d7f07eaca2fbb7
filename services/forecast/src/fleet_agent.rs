//! The agents that a forecast counts on.

use wire::v1;

/// An agent that may work on the run.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetAgent {
    pub name: String,
    pub roles: Vec<String>,
    /// Generation speed that it reports; 0 if unknown.
    pub tokens_per_s: f64,
    /// Power that it reports now.
    pub watts: Option<f64>,
}

impl FleetAgent {
    /// Describes an agent by its status.
    pub fn from_status(status: &v1::AgentStatus) -> Self {
        Self {
            name: status.agent.clone(),
            roles: status.roles.clone(),
            tokens_per_s: finite_or_zero(status.tokens_per_s),
            watts: status.telemetry.as_ref().and_then(|it| it.watts).map(finite_or_zero),
        }
    }

    /// Returns true if the agent has a role.
    pub fn has_role(&self, role: &str) -> bool {
        self.roles.iter().any(|has| has == role)
    }
}

/// Facts and statuses of members may contain any number.
pub(crate) fn finite_or_zero(value: f64) -> f64 {
    if value.is_finite() { value.max(0.0) } else { 0.0 }
}
