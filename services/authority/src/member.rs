//! Who belongs to a fleet, and as what.

use std::{collections::BTreeSet, fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use wire::{AgentId, Pool, WorkKind};

/// What an agent may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Trainer,
    Generator,
    Verifier,
    Evaluator,
    /// Publishes the checkpoints of trainings that are not the fleet's.
    Watcher,
}

/// What a user may do; each includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Sees everything but secrets.
    Reader,
    /// Submits and steers runs, drains agents.
    Operator,
    /// Lets others in and cuts them off.
    Admin,
}

/// What a member is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Standing {
    Agent { roles: BTreeSet<Role>, pool: Pool },
    User { scope: Scope },
    Coordinator,
}

impl Standing {
    /// Whether it is in the fleet's own account, where everything is allowed; others have accounts
    /// of their own.
    pub fn runs_the_fleet(&self) -> bool {
        matches!(self, Self::Coordinator | Self::User { scope: Scope::Admin })
    }
}

/// Names are unique over all members of a fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub name: AgentId,
    pub standing: Standing,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no role; there are trainer, generator, verifier, evaluator and watcher (K117)")]
pub struct UnknownRole(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no scope; there are reader, operator and admin (K117)")]
pub struct UnknownScope(String);

impl Role {
    pub const ALL: [Self; 5] =
        [Self::Trainer, Self::Generator, Self::Verifier, Self::Evaluator, Self::Watcher];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Trainer => "trainer",
            Self::Generator => "generator",
            Self::Verifier => "verifier",
            Self::Evaluator => "evaluator",
            Self::Watcher => "watcher",
        }
    }

    /// The work it takes from the log; a watcher takes none.
    pub fn work(self) -> Option<WorkKind> {
        match self {
            Self::Trainer => Some(WorkKind::Train),
            Self::Generator => Some(WorkKind::Generate),
            Self::Verifier => Some(WorkKind::Verify),
            Self::Evaluator => Some(WorkKind::Eval),
            Self::Watcher => None,
        }
    }
}

impl Scope {
    pub const ALL: [Self; 3] = [Self::Reader, Self::Operator, Self::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reader => "reader",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = UnknownRole;

    fn from_str(text: &str) -> Result<Self, UnknownRole> {
        let found = Self::ALL.into_iter().find(|role| role.as_str() == text);
        found.ok_or_else(|| UnknownRole(text.to_owned()))
    }
}

impl FromStr for Scope {
    type Err = UnknownScope;

    fn from_str(text: &str) -> Result<Self, UnknownScope> {
        let found = Self::ALL.into_iter().find(|scope| scope.as_str() == text);
        found.ok_or_else(|| UnknownScope(text.to_owned()))
    }
}
