//! Who was cut off: what the gateway looks up at every call. Folded from the members' bucket.

use std::collections::BTreeMap;

use authority::{Caller, Standing};
use bus::MembersEvent;

use super::{MEMBER, records::MemberRecord};

/// Members as the bucket has them now.
#[derive(Debug, Clone, Default)]
pub struct Roll {
    members: BTreeMap<String, Known>,
    /// Until all of the bucket was read, nobody can be told to be a member.
    complete: bool,
}

#[derive(Debug, Clone)]
struct Known {
    key: String,
    standing: Standing,
    revoked: bool,
}

/// Why a bearer that is good in itself is not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Objection {
    #[error(
        "{name} was revoked; whoever administers the fleet can let it in again with a new join token (K109)"
    )]
    Revoked { name: String },
    #[error(
        "there is no member {name} any more; whoever administers the fleet can let it in again with a \
         new join token (K109)"
    )]
    Unknown { name: String },
    #[error(
        "the name {name} is another member's by now; use the newer kit, or join under another name (K109)"
    )]
    Replaced { name: String },
}

impl Roll {
    pub(super) fn apply(&mut self, event: MembersEvent) {
        match event {
            MembersEvent::Value { key, value } => {
                let Some(name) = key.strip_prefix(MEMBER) else { return };
                match serde_json::from_slice::<MemberRecord>(&value) {
                    Ok(MemberRecord { key, standing, revoked_ms, .. }) => {
                        let known = Known { key, standing, revoked: revoked_ms.is_some() };
                        self.members.insert(name.to_owned(), known);
                    }
                    // A newer version's: what was known of it stays.
                    Err(error) => tracing::warn!(name, %error, "a member's record cannot be read"),
                }
            }
            MembersEvent::Removed { key } => {
                if let Some(name) = key.strip_prefix(MEMBER) {
                    self.members.remove(name);
                }
            }
            MembersEvent::CaughtUp => self.complete = true,
            MembersEvent::Restarted => *self = Self::default(),
        }
    }

    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// What those are who were not cut off.
    pub(super) fn standings(&self) -> impl Iterator<Item = &Standing> {
        self.members.values().filter(|known| !known.revoked).map(|known| &known.standing)
    }

    /// What speaks against a caller. The fleet's own members have no record, and no end.
    pub fn objection(&self, caller: &Caller) -> Option<Objection> {
        let name = || caller.name.to_string();
        let Some(known) = self.members.get(caller.name.as_str()) else {
            return caller.expires_at.map(|_| Objection::Unknown { name: name() });
        };
        if known.key != caller.key {
            return Some(Objection::Replaced { name: name() });
        }
        known.revoked.then(|| Objection::Revoked { name: name() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(key: &str) -> Caller {
        let roles = std::collections::BTreeSet::new();
        let name = "box-3".parse().unwrap();
        Caller { name, scope: None, roles, key: key.into(), expires_at: Some(1) }
    }

    fn told(key: &str, revoked: bool) -> MembersEvent {
        let revoked = if revoked { r#","revoked_ms":7"# } else { "" };
        let value = format!(
            r#"{{"key":"{key}","standing":"coordinator","joined_ms":1,"renewed_ms":1,"expires_ms":1{revoked}}}"#
        );
        MembersEvent::Value { key: "member.box-3".into(), value: value.into() }
    }

    #[test]
    fn a_member_that_was_revoked_or_replaced_is_objected_to() {
        let mut roll = Roll::default();
        assert!(!roll.is_complete());
        assert!(matches!(roll.objection(&caller("ours")), Some(Objection::Unknown { .. })));
        let own = Caller { expires_at: None, ..caller("ours") };
        assert_eq!(roll.objection(&own), None, "the fleet's own have no record");
        roll.apply(told("ours", false));
        roll.apply(MembersEvent::CaughtUp);
        assert!(roll.is_complete());
        assert_eq!(roll.objection(&caller("ours")), None);
        assert!(matches!(roll.objection(&caller("old")), Some(Objection::Replaced { .. })));
        roll.apply(told("ours", true));
        assert!(matches!(roll.objection(&caller("ours")), Some(Objection::Revoked { .. })));
        roll.apply(told("new", false));
        assert!(matches!(roll.objection(&caller("ours")), Some(Objection::Replaced { .. })));
    }

    #[test]
    fn a_record_that_cannot_be_read_lets_nobody_back_in() {
        let mut roll = Roll::default();
        roll.apply(told("ours", true));
        roll.apply(MembersEvent::Value { key: "member.box-3".into(), value: "{".into() });
        assert!(roll.objection(&caller("ours")).is_some());
    }
}
