//! The list of members and revocations, which the gateway consults for every call. Folded from the
//! members' bucket.

use std::collections::BTreeMap;

use bus::MembersEvent;
use identity::{GatewayCaller, MemberKind, MemberRole};

use super::{MEMBER, records::MemberRecord};

/// The members and their state, as the bucket has them now.
#[derive(Debug, Clone, Default)]
pub struct RevocationList {
    members: BTreeMap<String, ListedMember>,
    /// Until the whole bucket was read, no caller can be confirmed as a member.
    is_caught_up: bool,
}

#[derive(Debug, Clone)]
struct ListedMember {
    key: String,
    standing: MemberKind,
    revoked: bool,
}

/// The reason why a valid bearer token is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DenyReason {
    #[error("{name} was revoked; an administrator can admit it again with a new join token (K109)")]
    Revoked { name: String },
    #[error(
        "there is no member {name} any more; an administrator can admit it again with a new join \
         token (K109)"
    )]
    Unknown { name: String },
    #[error(
        "the name {name} now belongs to another member; use the newer credentials, or join under another \
         name (K109)"
    )]
    Replaced { name: String },
}

impl RevocationList {
    pub(super) fn apply_event(&mut self, event: MembersEvent) {
        match event {
            MembersEvent::Value { key, value } => {
                let Some(name) = key.strip_prefix(MEMBER) else { return };
                match serde_json::from_slice::<MemberRecord>(&value) {
                    Ok(MemberRecord { key, standing, revoked_ms, .. }) => {
                        let known = ListedMember { key, standing, revoked: revoked_ms.is_some() };
                        self.members.insert(name.to_owned(), known);
                    }
                    // A record of a newer version; the earlier state of this member stays.
                    Err(error) => tracing::warn!(name, %error, "a member's record cannot be read"),
                }
            }
            MembersEvent::Removed { key } => {
                if let Some(name) = key.strip_prefix(MEMBER) {
                    self.members.remove(name);
                }
            }
            MembersEvent::CaughtUp => self.is_caught_up = true,
            MembersEvent::Restarted => *self = Self::default(),
        }
    }

    /// Returns true if the whole bucket was read.
    pub fn is_complete(&self) -> bool {
        self.is_caught_up
    }

    pub(super) fn active_standings(&self) -> impl Iterator<Item = &MemberKind> {
        self.members.values().filter(|known| !known.revoked).map(|known| &known.standing)
    }

    /// Returns false if a name is that of a member without this role in this pool. An open fleet has
    /// no members, and the fleet's own have no record.
    pub fn may_have_role(&self, name: &str, role: MemberRole, pool: &str) -> bool {
        self.members.get(name).is_none_or(|known| {
            let MemberKind::Agent { roles, pool: own } = &known.standing else { return false };
            roles.contains(&role) && own.as_str() == pool && !known.revoked
        })
    }

    /// Returns the reason to refuse a caller, if any. The fleet's own members have no record.
    pub fn deny_reason(&self, caller: &GatewayCaller) -> Option<DenyReason> {
        let name = || caller.name.to_string();
        let Some(known) = self.members.get(caller.name.as_str()) else {
            return caller.is_recorded.then(|| DenyReason::Unknown { name: name() });
        };
        if known.key != caller.public_key {
            return Some(DenyReason::Replaced { name: name() });
        }
        known.revoked.then(|| DenyReason::Revoked { name: name() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(key: &str) -> GatewayCaller {
        let roles = std::collections::BTreeSet::new();
        let name = "box-3".parse().unwrap();
        let (public_key, expires_at) = (key.into(), Some(1));
        GatewayCaller { name, scope: None, roles, public_key, expires_at, is_recorded: true }
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
        let mut list = RevocationList::default();
        assert!(!list.is_complete());
        assert!(matches!(list.deny_reason(&caller("ours")), Some(DenyReason::Unknown { .. })));
        let own = GatewayCaller { is_recorded: false, ..caller("ours") };
        assert_eq!(list.deny_reason(&own), None, "the fleet's own have no record");
        list.apply_event(told("ours", false));
        list.apply_event(MembersEvent::CaughtUp);
        assert!(list.is_complete());
        assert_eq!(list.deny_reason(&caller("ours")), None);
        assert!(matches!(list.deny_reason(&caller("old")), Some(DenyReason::Replaced { .. })));
        list.apply_event(told("ours", true));
        assert!(matches!(list.deny_reason(&caller("ours")), Some(DenyReason::Revoked { .. })));
        list.apply_event(told("new", false));
        assert!(matches!(list.deny_reason(&caller("ours")), Some(DenyReason::Replaced { .. })));
    }

    #[test]
    fn an_agent_has_the_roles_and_the_pool_of_its_record() {
        let mut list = RevocationList::default();
        let serves = |list: &RevocationList, pool: &str| {
            list.may_have_role("box-3", MemberRole::Server, pool)
        };
        assert!(serves(&list, "default"), "an open fleet");
        let standing = |roles: &[MemberRole]| {
            let (roles, pool) = (roles.iter().copied().collect(), "default".parse().unwrap());
            serde_json::to_string(&MemberKind::Agent { roles, pool }).unwrap()
        };
        for (roles, revoked, expected) in [
            (&[MemberRole::Trainer][..], false, false),
            (&[MemberRole::Trainer, MemberRole::Server], false, true),
            (&[MemberRole::Server], true, false),
        ] {
            let MembersEvent::Value { key, value } = told("ours", revoked) else {
                unreachable!("it is a value")
            };
            let value = String::from_utf8(value.to_vec()).unwrap();
            let value = value.replace(r#""coordinator""#, &standing(roles));
            list.apply_event(MembersEvent::Value { key, value: value.into() });
            assert_eq!(serves(&list, "default"), expected, "{roles:?}");
            assert!(!serves(&list, "other"), "{roles:?}");
        }
    }

    #[test]
    fn a_record_that_cannot_be_read_lets_nobody_back_in() {
        let mut list = RevocationList::default();
        list.apply_event(told("ours", true));
        list.apply_event(MembersEvent::Value { key: "member.box-3".into(), value: "{".into() });
        assert!(list.deny_reason(&caller("ours")).is_some());
    }
}
