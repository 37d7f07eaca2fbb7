//! Who may write what into the store. Every member reads everything: what is there is named by
//! digests that the log tells all of them.
//!
//! | | may write | may remove |
//! |---|---|---|
//! | trainer | `runs/*/checkpoints/`, `runs/*/resume/` | `runs/*/resume/` |
//! | watcher | `runs/*/checkpoints/`, and what a submission writes | |
//! | operator, admin | `blobs/`, `models/`; a manifest beside files of their own | |
//! | the others | | |

use authority::{Caller, Role, Scope};
use store::RelativePath;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Act {
    Read,
    Write,
    Remove,
}

/// What a key is to those who write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Checkpoint,
    Resume,
    Blob,
    Model,
    /// The manifest or the sums of a directory that a user copied there.
    Adopted,
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{who} may not {act} {key} in the store: {may} (K104)")]
pub(super) struct Denied {
    who: String,
    act: &'static str,
    key: String,
    may: &'static str,
}

pub(super) fn check(caller: &Caller, act: Act, key: &RelativePath) -> Result<(), Denied> {
    let kind = kind(key);
    let allowed = !is_hidden(key)
        && match act {
            Act::Read => true,
            Act::Write => writes(caller, kind),
            Act::Remove => caller.roles.contains(&Role::Trainer) && kind == Kind::Resume,
        };
    if allowed {
        return Ok(());
    }
    Err(Denied { who: who(caller), act: act.verb(), key: key.to_string(), may: may(kind, act) })
}

impl Act {
    fn verb(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Remove => "remove",
        }
    }
}

fn writes(caller: &Caller, kind: Kind) -> bool {
    let submits = caller.scope.is_some_and(|scope| scope >= Scope::Operator);
    let watches = caller.roles.contains(&Role::Watcher);
    let trains = caller.roles.contains(&Role::Trainer);
    match kind {
        Kind::Checkpoint => trains || watches,
        Kind::Resume => trains,
        Kind::Blob | Kind::Model => submits || watches,
        Kind::Adopted => submits,
        Kind::Other => false,
    }
}

fn kind(key: &RelativePath) -> Kind {
    let segments: Vec<&str> = key.as_str().split('/').collect();
    match segments[..] {
        ["runs", _, "checkpoints", _, _, ..] => Kind::Checkpoint,
        ["runs", _, "resume", _, _, ..] => Kind::Resume,
        ["blobs", _, _] => Kind::Blob,
        ["models", _, _, ..] => Kind::Model,
        ["runs" | "blobs", ..] => Kind::Other,
        [.., "manifest.json" | "B3SUMS"] => Kind::Adopted,
        _ => Kind::Other,
    }
}

/// Where uploads lie.
fn is_hidden(key: &RelativePath) -> bool {
    key.as_str().split('/').next() == Some(".door")
}

fn who(caller: &Caller) -> String {
    let name = &caller.name;
    match caller.scope {
        Some(Scope::Reader) => format!("{name}, a reader,"),
        Some(Scope::Operator) => format!("{name}, an operator,"),
        Some(Scope::Admin) => format!("{name}, an admin,"),
        None if caller.roles.is_empty() => format!("{name}, who has no role,"),
        None => {
            let roles: Vec<&str> = caller.roles.iter().map(|role| role.as_str()).collect();
            format!("{name} ({})", roles.join(", "))
        }
    }
}

fn may(kind: Kind, act: Act) -> &'static str {
    match (act, kind) {
        (Act::Remove, Kind::Resume) => "trainers may",
        (Act::Remove, _) => "nobody may, by the gateway",
        (_, Kind::Checkpoint) => "trainers and watchers may",
        (_, Kind::Resume) => "trainers may",
        (_, Kind::Blob | Kind::Model) => "operators and watchers may",
        (_, Kind::Adopted) => "operators may",
        (_, Kind::Other) => "nobody may, by the gateway",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use wire::AgentId;

    use super::*;

    fn caller(name: &str, scope: Option<Scope>, roles: BTreeSet<Role>) -> Caller {
        let name = AgentId::new(name).unwrap();
        Caller { name, scope, roles, key: String::new(), expires_at: None }
    }

    fn agent(role: Role) -> Caller {
        caller("box-3", None, [role].into())
    }

    fn user(scope: Scope) -> Caller {
        caller("ann", Some(scope), [].into())
    }

    fn key(path: &str) -> RelativePath {
        RelativePath::new(path).unwrap()
    }

    const KEYS: [&str; 9] = [
        "runs/r-1/checkpoints/c1-s2-0123/adapter/x",
        "runs/r-1/resume/c1-s2-0123/optimizer.pt",
        "blobs/ab/abcd",
        "models/base-0123/config.json",
        "mine/B3SUMS",
        "runs/r-1/archive/c1-0123/samples.jsonl",
        "mine/model.safetensors",
        "manifest",
        ".door/uploads/x",
    ];

    fn allowed(caller: &Caller, act: Act) -> Vec<usize> {
        (0..KEYS.len()).filter(|n| check(caller, act, &key(KEYS[*n])).is_ok()).collect()
    }

    #[test]
    fn each_member_writes_what_its_part_calls_for_and_nothing_else() {
        for (caller, writes, removes) in [
            (agent(Role::Trainer), vec![0, 1], vec![1]),
            (agent(Role::Watcher), vec![0, 2, 3], vec![]),
            (agent(Role::Generator), vec![], vec![]),
            (agent(Role::Verifier), vec![], vec![]),
            (agent(Role::Evaluator), vec![], vec![]),
            (user(Scope::Reader), vec![], vec![]),
            (user(Scope::Operator), vec![2, 3, 4], vec![]),
            (user(Scope::Admin), vec![2, 3, 4], vec![]),
        ] {
            assert_eq!(allowed(&caller, Act::Write), writes, "{caller:?}");
            assert_eq!(allowed(&caller, Act::Remove), removes, "{caller:?}");
            assert_eq!(allowed(&caller, Act::Read), (0..8).collect::<Vec<_>>(), "{caller:?}");
        }
    }

    #[test]
    fn a_denial_names_who_what_and_who_may() {
        let denied = check(&agent(Role::Generator), Act::Write, &key(KEYS[0])).unwrap_err();
        let said = denied.to_string();
        for word in ["box-3 (generator)", "write", KEYS[0], "trainers and watchers may"] {
            assert!(said.contains(word), "no {word:?} in {said}");
        }
    }
}
