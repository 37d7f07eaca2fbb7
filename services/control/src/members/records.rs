//! What is kept of members and join tokens, and what follows from it: pure functions of records
//! and a time. Times are in milliseconds since 1970.

use std::collections::BTreeSet;

use authority::{Role, Standing};
use serde::{Deserialize, Serialize};
use wire::{AgentId, Pool};

use super::Refusal;

/// What the fleet's own members are called, whom no record speaks of.
const RESERVED: [&str; 3] = ["admin", "coordinator", "system"];

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TokenRecord {
    pub(crate) secret_hash: String,
    pub(crate) roles: BTreeSet<Role>,
    pub(crate) pool: Pool,
    pub(crate) uses: u32,
    pub(crate) used_by: Vec<Use>,
    pub(crate) created_ms: u64,
    pub(crate) created_by: String,
    pub(crate) expires_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) revoked_ms: Option<u64>,
}

/// Who came in with a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Use {
    pub(crate) name: AgentId,
    pub(crate) key: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberRecord {
    /// Its public key.
    pub(crate) key: String,
    pub(crate) standing: Standing,
    pub(crate) joined_ms: u64,
    pub(crate) renewed_ms: u64,
    pub(crate) expires_ms: u64,
    /// Of the newest proof it gave: an older one is a repetition.
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

/// Whether a join costs a use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    New,
    /// It was paid for: the answer was lost.
    Again,
}

impl TokenRecord {
    pub(crate) fn uses_left(&self) -> u32 {
        self.uses.saturating_sub(u32::try_from(self.used_by.len()).unwrap_or(u32::MAX))
    }

    /// Whether whoever knows this secret may come in.
    pub(crate) fn admit(
        &self,
        id: &str,
        secret_hash: &str,
        who: &Use,
        now_ms: u64,
    ) -> Result<Admission, Refusal> {
        if self.secret_hash != secret_hash {
            return Err(Refusal::NoToken);
        }
        if self.revoked_ms.is_some() {
            return Err(Refusal::TokenRevoked { id: id.to_owned() });
        }
        if now_ms >= self.expires_ms {
            let ago_s = (now_ms - self.expires_ms) / 1000;
            return Err(Refusal::TokenExpired { id: id.to_owned(), ago_s });
        }
        if self.used_by.contains(who) {
            return Ok(Admission::Again);
        }
        match self.uses_left() {
            0 => Err(Refusal::TokenUsedUp { id: id.to_owned(), uses: self.uses }),
            _ => Ok(Admission::New),
        }
    }

    /// The roles asked for, if the token is good for them; none means all.
    pub(crate) fn roles(&self, wanted: &BTreeSet<Role>) -> Result<BTreeSet<Role>, Refusal> {
        if wanted.is_empty() {
            return Ok(self.roles.clone());
        }
        match wanted.iter().find(|role| !self.roles.contains(role)) {
            Some(role) => Err(Refusal::NotOffered { role: *role, offered: named(&self.roles) }),
            None => Ok(wanted.clone()),
        }
    }
}

/// `trainer, verifier`
pub(crate) fn named(roles: &BTreeSet<Role>) -> String {
    roles.iter().map(|role| role.as_str()).collect::<Vec<_>>().join(", ")
}

/// Whether the holder of this key may have this name, which may be somebody's already.
pub(crate) fn may_have(
    name: &AgentId,
    key: &str,
    before: Option<&MemberRecord>,
) -> Result<(), Refusal> {
    let name = || name.to_string();
    if RESERVED.contains(&name().as_str()) {
        return Err(Refusal::Reserved { name: name() });
    }
    match before {
        Some(record) if record.key == key && record.revoked_ms.is_some() => {
            Err(Refusal::Revoked { name: name() })
        }
        Some(record) if record.key != key && record.revoked_ms.is_none() => {
            Err(Refusal::NameTaken { name: name() })
        }
        _ => Ok(()),
    }
}

/// A proof works once.
pub(crate) fn is_fresh(record: &MemberRecord, key: &str, at_ms: u64) -> Result<(), Refusal> {
    if record.key == key && at_ms <= record.proved_ms {
        return Err(Refusal::Repeated);
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
            roles: [Role::Generator, Role::Evaluator].into(),
            pool: "default".parse().unwrap(),
            uses: 2,
            used_by: Vec::new(),
            created_ms: NOW,
            created_by: "admin".into(),
            expires_ms: NOW + 1000,
            revoked_ms: None,
        }
    }

    fn by(name: &str) -> Use {
        Use { name: name.parse().unwrap(), key: format!("U-{name}") }
    }

    fn member(key: &str, revoked_ms: Option<u64>) -> MemberRecord {
        MemberRecord {
            key: key.into(),
            standing: Standing::Coordinator,
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
        let admit = |token: &TokenRecord, who: &str, now| token.admit("t", "hash", &by(who), now);
        assert_eq!(admit(&token, "a", NOW).unwrap(), Admission::New);
        token.used_by = vec![by("a"), by("b")];
        assert_eq!(admit(&token, "b", NOW).unwrap(), Admission::Again);
        let used_up = admit(&token, "c", NOW).unwrap_err();
        assert!(matches!(used_up, Refusal::TokenUsedUp { uses: 2, .. }), "{used_up}");
        let late = admit(&record(), "a", NOW + 3000).unwrap_err();
        assert!(matches!(late, Refusal::TokenExpired { ago_s: 2, .. }), "{late}");
        let wrong = record().admit("t", "other", &by("a"), NOW).unwrap_err();
        assert!(matches!(wrong, Refusal::NoToken), "{wrong}");
        let revoked = TokenRecord { revoked_ms: Some(NOW), ..token };
        assert!(matches!(admit(&revoked, "a", NOW), Err(Refusal::TokenRevoked { .. })));
    }

    #[test]
    fn roles_are_some_of_the_tokens_or_all_of_them() {
        let token = record();
        assert_eq!(token.roles(&BTreeSet::new()).unwrap(), token.roles);
        let some = [Role::Evaluator].into();
        assert_eq!(token.roles(&some).unwrap(), some);
        let error = token.roles(&[Role::Trainer].into()).unwrap_err().to_string();
        assert!(error.contains("trainer") && error.contains("generator, evaluator"), "{error}");
    }

    #[test]
    fn a_name_is_one_members_until_that_one_is_revoked() {
        let name = "box-3".parse().unwrap();
        let has = |before: Option<&MemberRecord>| may_have(&name, "ours", before);
        has(None).unwrap();
        has(Some(&member("ours", None))).unwrap();
        has(Some(&member("theirs", Some(NOW)))).unwrap();
        assert!(matches!(has(Some(&member("theirs", None))), Err(Refusal::NameTaken { .. })));
        assert!(matches!(has(Some(&member("ours", Some(NOW)))), Err(Refusal::Revoked { .. })));
        let admin = may_have(&"admin".parse().unwrap(), "ours", None);
        assert!(matches!(admin, Err(Refusal::Reserved { .. })));
    }

    #[test]
    fn a_proof_works_once() {
        let record = member("ours", None);
        assert!(is_fresh(&record, "ours", NOW).is_err());
        is_fresh(&record, "ours", NOW + 1).unwrap();
        is_fresh(&record, "a new key", NOW - 5).unwrap();
    }

    #[test]
    fn records_read_back_and_hold_no_secret() {
        let text = serde_json::to_string(&record()).unwrap();
        assert_eq!(serde_json::from_str::<TokenRecord>(&text).unwrap(), record());
        let standing = Standing::Agent { roles: record().roles, pool: record().pool };
        let record = MemberRecord { standing, ..member("ours", Some(NOW)) };
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<MemberRecord>(&text).unwrap(), record);
    }
}
