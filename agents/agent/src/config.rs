//! The identity and settings of an agent.

use std::{path::PathBuf, time::Duration};

use wire::{AgentId, Pool, v1};

use crate::HostDoctor;

/// The identity and settings of one agent.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// Unique in the fleet.
    pub id: AgentId,
    /// The program's version, for users.
    pub version: String,
    pub pool: Pool,
    /// The agent's own directory, for worker logs and other files.
    pub directory: PathBuf,
    /// The time after which an unrenewed lease expires.
    pub lease: Duration,
    /// The name of the host's hardware profile.
    pub profile: String,
    pub doctor: HostDoctor,
    /// Requested roles that this process cannot take until it is restarted.
    pub withheld: Vec<v1::Withheld>,
}
