//! The rights of members in the store. Every member may read everything, as objects are named by
//! digests that the log shows to all members.
//!
//! | | may write | may remove |
//! |---|---|---|
//! | trainer | `runs/*/checkpoints/`, `runs/*/resume/` | `runs/*/resume/` |
//! | watcher | `runs/*/checkpoints/`, `blobs/`, `models/` | |
//! | operator, admin | `blobs/`, `models/`; a manifest or `B3SUMS` beside files of their own | |
//! | admin | `REMOVED.json` in the trees of runs | `runs/*/checkpoints/`, `runs/*/resume/`, `runs/*/cycles/` |
//! | others | | |

use identity::{GatewayCaller, MemberRole, UserScope};
use store::{REMOVAL_FILE, RelativePath};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoreAction {
    Read,
    Write,
    Remove,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeyKind {
    Checkpoint,
    Resume,
    /// The archive of a cycle.
    Archive,
    /// The record of a tree's removal.
    Removal,
    Blob,
    Model,
    /// The manifest or the checksums of a directory that a user copied into the store.
    UserDirectory,
    /// Not writable for members.
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{caller} may not {action} {key} in the store: {allowed} (K104)")]
pub(super) struct StoreAccessDenied {
    caller: String,
    action: &'static str,
    key: String,
    allowed: &'static str,
}

pub(super) fn check_access(
    caller: &GatewayCaller,
    action: StoreAction,
    key: &RelativePath,
) -> Result<(), StoreAccessDenied> {
    let kind = classify_key(key);
    let is_allowed = !is_hidden(key)
        && match action {
            StoreAction::Read => true,
            StoreAction::Write => may_write(caller, kind),
            StoreAction::Remove => may_remove(caller, kind),
        };
    if is_allowed {
        return Ok(());
    }
    Err(StoreAccessDenied {
        caller: describe_caller(caller),
        action: action.verb_name(),
        key: key.to_string(),
        allowed: describe_allowed(kind, action),
    })
}

impl StoreAction {
    fn verb_name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Remove => "remove",
        }
    }
}

fn may_write(caller: &GatewayCaller, kind: KeyKind) -> bool {
    let submits = caller.scope.is_some_and(|scope| scope >= UserScope::Operator);
    let watches = caller.roles.contains(&MemberRole::Watcher);
    let trains = caller.roles.contains(&MemberRole::Trainer);
    match kind {
        KeyKind::Checkpoint => trains || watches,
        KeyKind::Resume => trains,
        KeyKind::Blob | KeyKind::Model => submits || watches,
        KeyKind::UserDirectory => submits,
        KeyKind::Removal => caller.scope == Some(UserScope::Admin),
        KeyKind::Archive | KeyKind::Other => false,
    }
}

fn may_remove(caller: &GatewayCaller, kind: KeyKind) -> bool {
    let is_admin = caller.scope == Some(UserScope::Admin);
    match kind {
        KeyKind::Resume => is_admin || caller.roles.contains(&MemberRole::Trainer),
        KeyKind::Checkpoint | KeyKind::Archive | KeyKind::Removal => is_admin,
        KeyKind::Blob | KeyKind::Model | KeyKind::UserDirectory | KeyKind::Other => false,
    }
}

fn classify_key(key: &RelativePath) -> KeyKind {
    let segments: Vec<&str> = key.as_str().split('/').collect();
    match segments[..] {
        ["runs", _, "checkpoints" | "cycles", _, REMOVAL_FILE] => KeyKind::Removal,
        ["runs", _, "cycles", _, _, ..] => KeyKind::Archive,
        ["runs", _, "checkpoints", _, _, ..] => KeyKind::Checkpoint,
        ["runs", _, "resume", _, _, ..] => KeyKind::Resume,
        ["blobs", _, _] => KeyKind::Blob,
        ["models", _, _, ..] => KeyKind::Model,
        ["runs" | "blobs", ..] => KeyKind::Other,
        [.., "manifest.json" | "B3SUMS"] => KeyKind::UserDirectory,
        _ => KeyKind::Other,
    }
}

/// Returns true for the directory of unfinished uploads.
fn is_hidden(key: &RelativePath) -> bool {
    key.as_str().split('/').next() == Some(".door")
}

fn describe_caller(caller: &GatewayCaller) -> String {
    let name = &caller.name;
    match caller.scope {
        Some(UserScope::Client) => format!("{name}, a client,"),
        Some(UserScope::Reader) => format!("{name}, a reader,"),
        Some(UserScope::Operator) => format!("{name}, an operator,"),
        Some(UserScope::Admin) => format!("{name}, an admin,"),
        None if caller.roles.is_empty() => format!("{name}, without a role,"),
        None => {
            let roles: Vec<&str> = caller.roles.iter().map(|role| role.as_str()).collect();
            format!("{name} ({})", roles.join(", "))
        }
    }
}

fn describe_allowed(kind: KeyKind, action: StoreAction) -> &'static str {
    match (action, kind) {
        (StoreAction::Remove, KeyKind::Resume) => "trainers and admins may",
        (StoreAction::Remove, KeyKind::Checkpoint | KeyKind::Archive | KeyKind::Removal)
        | (_, KeyKind::Removal) => "admins may",
        (StoreAction::Remove, _) => "not allowed through the gateway",
        (_, KeyKind::Checkpoint) => "trainers and watchers may",
        (_, KeyKind::Resume) => "trainers may",
        (_, KeyKind::Blob | KeyKind::Model) => "operators and watchers may",
        (_, KeyKind::UserDirectory) => "operators may",
        (_, KeyKind::Archive | KeyKind::Other) => "not allowed through the gateway",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use wire::AgentId;

    use super::*;

    fn caller(name: &str, scope: Option<UserScope>, roles: BTreeSet<MemberRole>) -> GatewayCaller {
        let name = AgentId::new(name).unwrap();
        let (public_key, expires_at, is_recorded) = (String::new(), None, false);
        GatewayCaller { name, scope, roles, public_key, expires_at, is_recorded }
    }

    fn agent(role: MemberRole) -> GatewayCaller {
        caller("box-3", None, [role].into())
    }

    fn user(scope: UserScope) -> GatewayCaller {
        caller("ann", Some(scope), [].into())
    }

    fn key(path: &str) -> RelativePath {
        RelativePath::new(path).unwrap()
    }

    const KEYS: [&str; 11] = [
        "runs/r-1/checkpoints/c1-s2-0123/adapter/x",
        "runs/r-1/resume/c1-s2-0123/optimizer.pt",
        "blobs/ab/abcd",
        "models/base-0123/config.json",
        "mine/B3SUMS",
        "runs/r-1/archive/c1-0123/samples.jsonl",
        "mine/model.safetensors",
        "manifest",
        "runs/r-1/cycles/c1-0123/facts.jsonl.gz",
        "runs/r-1/checkpoints/c1-s2-0123/REMOVED.json",
        ".door/uploads/x",
    ];

    fn allowed(caller: &GatewayCaller, action: StoreAction) -> Vec<usize> {
        (0..KEYS.len()).filter(|n| check_access(caller, action, &key(KEYS[*n])).is_ok()).collect()
    }

    #[test]
    fn each_member_writes_what_its_part_calls_for_and_nothing_else() {
        for (caller, writes, removes) in [
            (agent(MemberRole::Trainer), vec![0, 1], vec![1]),
            (agent(MemberRole::Watcher), vec![0, 2, 3], vec![]),
            (agent(MemberRole::Generator), vec![], vec![]),
            (agent(MemberRole::Verifier), vec![], vec![]),
            (agent(MemberRole::Evaluator), vec![], vec![]),
            (user(UserScope::Reader), vec![], vec![]),
            (user(UserScope::Operator), vec![2, 3, 4], vec![]),
            (user(UserScope::Admin), vec![2, 3, 4, 9], vec![0, 1, 8, 9]),
        ] {
            assert_eq!(allowed(&caller, StoreAction::Write), writes, "{caller:?}");
            assert_eq!(allowed(&caller, StoreAction::Remove), removes, "{caller:?}");
            assert_eq!(
                allowed(&caller, StoreAction::Read),
                (0..10).collect::<Vec<_>>(),
                "{caller:?}"
            );
        }
    }

    #[test]
    fn a_denial_names_who_what_and_who_may() {
        let denied = check_access(&agent(MemberRole::Generator), StoreAction::Write, &key(KEYS[0]))
            .unwrap_err();
        let message = denied.to_string();
        for word in ["box-3 (generator)", "write", KEYS[0], "trainers and watchers may"] {
            assert!(message.contains(word), "no {word:?} in {message}");
        }
    }
}
