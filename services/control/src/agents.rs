//! The fleet's agents, as their last status messages describe them.

use bus::PresenceError;
use wire::{AgentId, v1};

use crate::FleetControl;

/// A failure to drain an agent: the agent is unknown, or the bus cannot reach it.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    #[error("there is no agent {0}; `flotilla agents list` lists all (R111)")]
    Unknown(AgentId),
    #[error(transparent)]
    Presence(#[from] PresenceError),
}

impl FleetControl {
    /// Returns the last status of every agent, sorted by agent id.
    pub async fn list_agents(&self) -> Result<Vec<v1::AgentStatus>, PresenceError> {
        let mut agents = self.bus.list_statuses().await?;
        agents.sort_by(|a, b| a.agent.cmp(&b.agent));
        Ok(agents)
    }

    /// Asks an agent to drain: it finishes the jobs it holds, takes no new ones, and leaves the
    /// fleet. Fails with [`DrainError::Unknown`] if no agent of this id has a status.
    pub async fn drain_agent(&self, agent: &AgentId) -> Result<(), DrainError> {
        let known = self.list_agents().await?.iter().any(|status| status.agent == agent.as_str());
        if !known {
            return Err(DrainError::Unknown(agent.clone()));
        }
        let action = v1::agent_command::Action::Drain.into();
        Ok(self.bus.send_command(agent, &v1::AgentCommand { action }).await?)
    }
}
