//! The identity and settings of an agent.

use std::{path::PathBuf, time::Duration};

use wire::{AgentId, Pool, v1};

use crate::HostDoctor;

/// The intervals of what an agent does beside its jobs.
#[derive(Debug, Clone, Copy)]
pub struct AgentIntervals {
    /// Between two checks of a host that failed one, or of its memory.
    pub host_check: Duration,
    /// Between two durable records of the status, which the placement of a waiting training reads.
    pub status_record: Duration,
}

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
    pub intervals: AgentIntervals,
    /// Requested roles that this process cannot take until it is restarted.
    pub withheld: Vec<v1::Withheld>,
}
