//! The records of members and join tokens, and the decisions that follow from them, as pure
//! functions of records and a time. Times are in milliseconds since 1970.

use std::collections::BTreeSet;

use identity::{MemberKind, MemberRole};
use serde::{Deserialize, Serialize};
use wire::{AgentId, Pool};

use super::MembershipRefusal;

/// The fleet's own members have no records.
const RESERVED_NAMES: [&str; 3] = ["admin", "coordinator", "system"];

/// A join token: its rights, its validity and its uses. The secret is stored as a hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TokenRecord {
    pub(crate) secret_hash: String,
    pub(crate) roles: BTreeSet<MemberRole>,
    pub(crate) pool: Pool,
    pub(crate) uses: u32,
    pub(crate) used_by: Vec<TokenUse>,
    pub(crate) created_ms: u64,
    pub(crate) created_by: String,
    pub(crate) expires_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) revoked_ms: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TokenUse {
    pub(crate) name: AgentId,
    pub(crate) key: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberRecord {
    pub(crate) key: String,
    pub(crate) standing: MemberKind,
    pub(crate) joined_ms: u64,
    pub(crate) renewed_ms: u64,
    pub(crate) expires_ms: u64,
    /// Time of the newest accepted proof. An older proof is a replay.
    #[serde(default)]
    pub(crate) proved_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) token: Option<String>,
    #[serde(default)]
    pub(crate) host: String,
    #[serde(default)]
    pub(crate) version: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) revoked_ms: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenAdmission {
    New,
    /// The member has joined with this token before, and the answer was probably lost.
    AlreadyPaid,
}

impl TokenRecord {
    pub(crate) fn uses_left(&self) -> u32 {
        self.uses.saturating_sub(u32::try_from(self.used_by.len()).unwrap_or(u32::MAX))
    }

    /// Refuses if the secret is wrong, or the token is revoked, expired or used up.
    pub(crate) fn check_admission(
        &self,
        id: &str,
        secret_hash: &str,
        who: &TokenUse,
        now_ms: u64,
    ) -> Result<TokenAdmission, MembershipRefusal> {
        if self.secret_hash != secret_hash {
            return Err(MembershipRefusal::NoToken);
        }
        if self.revoked_ms.is_some() {
            return Err(MembershipRefusal::TokenRevoked { id: id.to_owned() });
        }
        if now_ms >= self.expires_ms {
            let ago_s = (now_ms - self.expires_ms) / 1000;
            return Err(MembershipRefusal::TokenExpired { id: id.to_owned(), ago_s });
        }
        if self.used_by.contains(who) {
            return Ok(TokenAdmission::AlreadyPaid);
        }
        match self.uses_left() {
            0 => Err(MembershipRefusal::TokenUsedUp { id: id.to_owned(), uses: self.uses }),
            _ => Ok(TokenAdmission::New),
        }
    }

    /// Returns the requested roles, or all roles of the token if none is requested.
    pub(crate) fn select_roles(
        &self,
        wanted: &BTreeSet<MemberRole>,
    ) -> Result<BTreeSet<MemberRole>, MembershipRefusal> {
        if wanted.is_empty() {
            return Ok(self.roles.clone());
        }
        match wanted.iter().find(|role| !self.roles.contains(role)) {
            Some(role) => Err(MembershipRefusal::RoleNotOffered {
                role: *role,
                offered: join_role_names(&self.roles),
            }),
            None => Ok(wanted.clone()),
        }
    }
}

pub(crate) fn join_role_names(roles: &BTreeSet<MemberRole>) -> String {
    roles.iter().map(|role| role.as_str()).collect::<Vec<_>>().join(", ")
}

/// Refuses if the name is reserved or belongs to an active member with another key, or if the key
/// was revoked. `before` is the current record of the name.
pub(crate) fn check_name_owner(
    name: &AgentId,
    key: &str,
    before: Option<&MemberRecord>,
) -> Result<(), MembershipRefusal> {
    let name = || name.to_string();
    if RESERVED_NAMES.contains(&name().as_str()) {
        return Err(MembershipRefusal::Reserved { name: name() });
    }
    match before {
        Some(record) if record.key == key && record.revoked_ms.is_some() => {
            Err(MembershipRefusal::Revoked { name: name() })
        }
        Some(record) if record.key != key && record.revoked_ms.is_none() => {
            Err(MembershipRefusal::NameTaken { name: name() })
        }
        _ => Ok(()),
    }
}

/// Accepts only a proof that is newer than the last accepted one, so that each works once.
pub(crate) fn check_proof_fresh(
    record: &MemberRecord,
    key: &str,
    at_ms: u64,
) -> Result<(), MembershipRefusal> {
    if record.key == key && at_ms <= record.proved_ms {
        return Err(MembershipRefusal::ProofReused);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000_000;

    fn record() -> TokenRecord {
        TokenRecord {
            secret_hash: "hash".into(),
            roles: [MemberRole::Generator, MemberRole::Evaluator].into(),
            pool: "default".parse().unwrap(),
            uses: 2,
            used_by: Vec::new(),
            created_ms: NOW,
            created_by: "admin".into(),
            expires_ms: NOW + 1000,
            revoked_ms: None,
        }
    }

    fn by(name: &str) -> TokenUse {
        TokenUse { name: name.parse().unwrap(), key: format!("U-{name}") }
    }

    fn member(key: &str, revoked_ms: Option<u64>) -> MemberRecord {
        MemberRecord {
            key: key.into(),
            standing: MemberKind::Coordinator,
            joined_ms: NOW,
            renewed_ms: NOW,
            expires_ms: NOW,
            proved_ms: NOW,
            token: None,
            host: String::new(),
            version: String::new(),
            revoked_ms,
        }
    }

    #[test]
    fn a_token_is_good_for_its_uses_its_time_and_its_secret() {
        let mut token = record();
        let admit =
            |token: &TokenRecord, who: &str, now| token.check_admission("t", "hash", &by(who), now);
        assert_eq!(admit(&token, "a", NOW).unwrap(), TokenAdmission::New);
        token.used_by = vec![by("a"), by("b")];
        assert_eq!(admit(&token, "b", NOW).unwrap(), TokenAdmission::AlreadyPaid);
        let used_up = admit(&token, "c", NOW).unwrap_err();
        assert!(matches!(used_up, MembershipRefusal::TokenUsedUp { uses: 2, .. }), "{used_up}");
        let late = admit(&record(), "a", NOW + 3000).unwrap_err();
        assert!(matches!(late, MembershipRefusal::TokenExpired { ago_s: 2, .. }), "{late}");
        let wrong = record().check_admission("t", "other", &by("a"), NOW).unwrap_err();
        assert!(matches!(wrong, MembershipRefusal::NoToken), "{wrong}");
        let revoked = TokenRecord { revoked_ms: Some(NOW), ..token };
        assert!(matches!(admit(&revoked, "a", NOW), Err(MembershipRefusal::TokenRevoked { .. })));
    }

    #[test]
    fn roles_are_some_of_the_tokens_or_all_of_them() {
        let token = record();
        assert_eq!(token.select_roles(&BTreeSet::new()).unwrap(), token.roles);
        let some = [MemberRole::Evaluator].into();
        assert_eq!(token.select_roles(&some).unwrap(), some);
        let error = token.select_roles(&[MemberRole::Trainer].into()).unwrap_err().to_string();
        assert!(error.contains("trainer") && error.contains("generator, evaluator"), "{error}");
    }

    #[test]
    fn a_name_is_one_members_until_that_one_is_revoked() {
        let name = "box-3".parse().unwrap();
        let has = |before: Option<&MemberRecord>| check_name_owner(&name, "ours", before);
        has(None).unwrap();
        has(Some(&member("ours", None))).unwrap();
        has(Some(&member("theirs", Some(NOW)))).unwrap();
        assert!(matches!(
            has(Some(&member("theirs", None))),
            Err(MembershipRefusal::NameTaken { .. })
        ));
        assert!(matches!(
            has(Some(&member("ours", Some(NOW)))),
            Err(MembershipRefusal::Revoked { .. })
        ));
        let admin = check_name_owner(&"admin".parse().unwrap(), "ours", None);
        assert!(matches!(admin, Err(MembershipRefusal::Reserved { .. })));
    }

    #[test]
    fn a_proof_works_once() {
        let record = member("ours", None);
        assert!(check_proof_fresh(&record, "ours", NOW).is_err());
        check_proof_fresh(&record, "ours", NOW + 1).unwrap();
        check_proof_fresh(&record, "a new key", NOW - 5).unwrap();
    }

    #[test]
    fn records_read_back_and_hold_no_secret() {
        let text = serde_json::to_string(&record()).unwrap();
        assert_eq!(serde_json::from_str::<TokenRecord>(&text).unwrap(), record());
        let standing = MemberKind::Agent { roles: record().roles, pool: record().pool };
        let record = MemberRecord { standing, ..member("ours", Some(NOW)) };
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<MemberRecord>(&text).unwrap(), record);
    }
}
