//! Members of a fleet and their roles.

use std::{collections::BTreeSet, fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use wire::{AgentId, Pool, WorkKind};

/// A role of an agent: the work it may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberRole {
    Trainer,
    Generator,
    Verifier,
    Scorer,
    Evaluator,
    /// Publishes the checkpoints of trainings that run outside of the fleet.
    Watcher,
    /// Answers requests to the models of channels.
    Server,
}

/// The rights of a user; each scope includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UserScope {
    /// May send requests to served models, and nothing else.
    Client,
    /// May read everything except secrets.
    Reader,
    Operator,
    Admin,
}

/// The kind of a member, with its rights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberKind {
    Agent { roles: BTreeSet<MemberRole>, pool: Pool },
    User { scope: UserScope },
    Coordinator,
}

impl MemberKind {
    /// Returns true for members of the fleet's own account, where everything is allowed.
    pub fn uses_fleet_account(&self) -> bool {
        matches!(self, Self::Coordinator | Self::User { scope: UserScope::Admin })
    }
}

/// A member of a fleet. Names are unique among all members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub name: AgentId,
    pub standing: MemberKind,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a role; the roles are trainer, generator, verifier, scorer, evaluator, watcher \
         and server (K117)"
)]
pub struct UnknownRoleError(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a scope; the scopes are client, reader, operator and admin (K117)")]
pub struct UnknownScopeError(String);

impl MemberRole {
    pub const ALL: [Self; 7] = [
        Self::Trainer,
        Self::Generator,
        Self::Verifier,
        Self::Scorer,
        Self::Evaluator,
        Self::Watcher,
        Self::Server,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Trainer => "trainer",
            Self::Generator => "generator",
            Self::Verifier => "verifier",
            Self::Scorer => "scorer",
            Self::Evaluator => "evaluator",
            Self::Watcher => "watcher",
            Self::Server => "server",
        }
    }

    /// Returns the work that the role takes from the log; watchers and servers take none.
    pub fn work_kind(self) -> Option<WorkKind> {
        match self {
            Self::Trainer => Some(WorkKind::Train),
            Self::Generator => Some(WorkKind::Generate),
            Self::Verifier => Some(WorkKind::Verify),
            Self::Scorer => Some(WorkKind::Score),
            Self::Evaluator => Some(WorkKind::Eval),
            Self::Watcher | Self::Server => None,
        }
    }
}

impl UserScope {
    /// The weakest scope comes first.
    pub const ALL: [Self; 4] = [Self::Client, Self::Reader, Self::Operator, Self::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Reader => "reader",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for MemberRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for UserScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for MemberRole {
    type Err = UnknownRoleError;

    fn from_str(text: &str) -> Result<Self, UnknownRoleError> {
        let found = Self::ALL.into_iter().find(|role| role.as_str() == text);
        found.ok_or_else(|| UnknownRoleError(text.to_owned()))
    }
}

impl FromStr for UserScope {
    type Err = UnknownScopeError;

    fn from_str(text: &str) -> Result<Self, UnknownScopeError> {
        let found = Self::ALL.into_iter().find(|scope| scope.as_str() == text);
        found.ok_or_else(|| UnknownScopeError(text.to_owned()))
    }
}
