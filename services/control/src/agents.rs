//! The fleet's agents, as they last said of themselves.

use bus::PresenceError;
use wire::{AgentId, v1};

use crate::Control;

#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    #[error("there is no agent {0}; `flotilla agents list` shows which there are (R111)")]
    Unknown(AgentId),
    #[error(transparent)]
    Presence(#[from] PresenceError),
}

impl Control {
    /// # Errors
    /// When the bus cannot be read.
    pub async fn agents(&self) -> Result<Vec<v1::AgentStatus>, PresenceError> {
        let mut agents = self.bus.statuses().await?;
        agents.sort_by(|a, b| a.agent.cmp(&b.agent));
        Ok(agents)
    }

    /// Asks an agent to finish what it holds, take nothing new, and leave.
    ///
    /// # Errors
    /// When there is no such agent, or it does not answer.
    pub async fn drain(&self, agent: &AgentId) -> Result<(), DrainError> {
        let known = self.agents().await?.iter().any(|status| status.agent == agent.as_str());
        if !known {
            return Err(DrainError::Unknown(agent.clone()));
        }
        let action = v1::agent_command::Action::Drain.into();
        Ok(self.bus.command(agent, &v1::AgentCommand { action }).await?)
    }
}
