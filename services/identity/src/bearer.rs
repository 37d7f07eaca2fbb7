//! Bearer tokens for the gateway: the caller, its role and the expiry.
//!
//! They have the same format and signing key as NATS user JWTs, but cannot be exchanged for them: a
//! bearer names the gateway as its audience.

use std::collections::BTreeSet;

use nkeys::KeyPair;
use serde::{Deserialize, Serialize};
use wire::{AgentId, Pool};

use crate::{
    Member, MemberKind, MemberRole, UserScope,
    claims::{self, ClaimsError},
};

/// NATS user JWTs have no audience, although the same key signs them.
const AUDIENCE: &str = "flotilla-gateway";
const BEARER_BYTES_MAX: usize = 4096;
const CLOCK_SKEW_MAX_S: u64 = 300;

/// A verified caller of the gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayCaller {
    pub name: AgentId,
    /// `None` for agents and coordinators.
    pub scope: Option<UserScope>,
    /// Empty for users and coordinators.
    pub roles: BTreeSet<MemberRole>,
    pub public_key: String,
    /// In seconds since 1970; `None` for the fleet's own members.
    pub expires_at: Option<u64>,
    /// False for the fleet's own members, which have no member record.
    pub is_recorded: bool,
}

/// The content of a bearer token, read by its holder without verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BearerInfo {
    pub name: AgentId,
    pub scope: Option<UserScope>,
    pub roles: BTreeSet<MemberRole>,
    pub pool: Option<Pool>,
}

/// The reason why a bearer token is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum BearerError {
    #[error(
        "the bearer is not a fleet's token: write `authorization: Bearer …` with the contents of \
         the credentials' bearer.jwt (K102)"
    )]
    Malformed,
    #[error(
        "the bearer is not this fleet's; use the credentials that were made for this fleet (K102)"
    )]
    Foreign,
    #[error(
        "the bearer expired {seconds} s ago; an agent renews it by itself while it runs, and for users `flotilla user create` makes new credentials (K103)"
    )]
    Expired { seconds: u64 },
    #[error(
        "the bearer was made {seconds} s in the future; set this machine's clock or the one of the bus host (timedatectl set-ntp true) (K103)"
    )]
    Early { seconds: u64 },
}

#[derive(Debug, Serialize, Deserialize)]
struct BearerClaims {
    aud: String,
    iss: String,
    sub: String,
    key: String,
    iat: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    exp: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scope: Option<UserScope>,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    roles: BTreeSet<MemberRole>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pool: Option<Pool>,
    /// True for a session of one of the fleet's own members, which expires although they do not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    own: bool,
}

pub(crate) fn issue_bearer(
    signer: &KeyPair,
    member: &Member,
    key: &str,
    now: u64,
    expires_at: Option<u64>,
) -> Result<String, ClaimsError> {
    let (scope, roles, pool) = match &member.standing {
        MemberKind::Agent { roles, pool } => (None, roles.clone(), Some(pool.clone())),
        MemberKind::User { scope } => (Some(*scope), BTreeSet::new(), None),
        MemberKind::Coordinator => (None, BTreeSet::new(), None),
    };
    let claims = BearerClaims {
        aud: AUDIENCE.to_owned(),
        iss: signer.public_key(),
        sub: member.name.to_string(),
        key: key.to_owned(),
        iat: now,
        exp: expires_at,
        scope,
        roles,
        pool,
        own: false,
    };
    claims::encode_token(signer, &claims)
}

/// Issues a bearer with the name, key and rights of a verified caller. It ends at `expires_at`, or
/// with the caller's own bearer if that is earlier.
pub(crate) fn issue_session_bearer(
    signer: &KeyPair,
    caller: &GatewayCaller,
    now: u64,
    expires_at: u64,
) -> Result<String, ClaimsError> {
    let claims = BearerClaims {
        aud: AUDIENCE.to_owned(),
        iss: signer.public_key(),
        sub: caller.name.to_string(),
        key: caller.public_key.clone(),
        iat: now,
        exp: Some(caller.expires_at.map_or(expires_at, |own| own.min(expires_at))),
        scope: caller.scope,
        roles: caller.roles.clone(),
        pool: None,
        own: !caller.is_recorded,
    };
    claims::encode_token(signer, &claims)
}

impl BearerInfo {
    /// Reads the content of a bearer without verifying its signature.
    pub fn read_unverified(bearer: &str) -> Result<Self, BearerError> {
        if bearer.len() > BEARER_BYTES_MAX {
            return Err(BearerError::Malformed);
        }
        let claims: BearerClaims =
            claims::decode_unverified(bearer).map_err(|_| BearerError::Malformed)?;
        let BearerClaims { sub, scope, roles, pool, .. } = claims;
        let name = AgentId::new(sub).map_err(|_| BearerError::Malformed)?;
        Ok(Self { name, scope, roles, pool })
    }
}

impl GatewayCaller {
    /// Verifies a bearer: signed by one of `signers` (public keys), issued for the gateway at most
    /// 300 s in the future, and valid at `now` (seconds since 1970). A later revocation of the
    /// member is not visible in the bearer.
    pub fn verify_bearer(bearer: &str, signers: &[String], now: u64) -> Result<Self, BearerError> {
        if bearer.len() > BEARER_BYTES_MAX {
            return Err(BearerError::Malformed);
        }
        let claims: BearerClaims =
            claims::decode_verified(bearer, signers).map_err(|error| match error {
                ClaimsError::Signature => BearerError::Foreign,
                _ => BearerError::Malformed,
            })?;
        if claims.aud != AUDIENCE {
            return Err(BearerError::Malformed);
        }
        if let Some(seconds) = claims.iat.checked_sub(now.saturating_add(CLOCK_SKEW_MAX_S + 1)) {
            return Err(BearerError::Early {
                seconds: seconds.saturating_add(CLOCK_SKEW_MAX_S + 1),
            });
        }
        if let Some(seconds) = claims.exp.and_then(|exp| now.checked_sub(exp)) {
            return Err(BearerError::Expired { seconds });
        }
        Ok(Self {
            name: AgentId::new(claims.sub).map_err(|_| BearerError::Malformed)?,
            scope: claims.scope,
            roles: claims.roles,
            public_key: claims.key,
            expires_at: claims.exp,
            is_recorded: claims.exp.is_some() && !claims.own,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn member(name: &str, standing: MemberKind) -> Member {
        Member { name: AgentId::new(name).unwrap(), standing }
    }

    fn agent() -> Member {
        let roles = [MemberRole::Generator, MemberRole::Evaluator].into();
        member("box-3", MemberKind::Agent { roles, pool: "default".parse().unwrap() })
    }

    #[test]
    fn a_bearer_names_its_caller_until_it_expires() {
        let signer = KeyPair::new_account();
        let signers = [signer.public_key()];
        let bearer = issue_bearer(&signer, &agent(), "UKEY", NOW, Some(NOW + 60)).unwrap();
        let caller = GatewayCaller::verify_bearer(&bearer, &signers, NOW + 59).unwrap();
        assert_eq!((caller.name.as_str(), caller.scope), ("box-3", None));
        assert_eq!(caller.roles, [MemberRole::Generator, MemberRole::Evaluator].into());
        assert_eq!((caller.public_key.as_str(), caller.expires_at), ("UKEY", Some(NOW + 60)));
        let shown = BearerInfo::read_unverified(&bearer).unwrap();
        assert_eq!((shown.roles, shown.pool.unwrap().as_str()), (caller.roles, "default"));
        let error = GatewayCaller::verify_bearer(&bearer, &signers, NOW + 63).unwrap_err();
        assert!(matches!(error, BearerError::Expired { seconds: 3 }), "{error}");
        GatewayCaller::verify_bearer(&bearer, &signers, NOW - CLOCK_SKEW_MAX_S).unwrap();
        let error = GatewayCaller::verify_bearer(&bearer, &signers, NOW - CLOCK_SKEW_MAX_S - 1)
            .unwrap_err();
        assert!(matches!(error, BearerError::Early { seconds: 301 }), "{error}");
    }

    #[test]
    fn a_user_has_a_scope_and_no_roles() {
        let signer = KeyPair::new_account();
        let user = member("ada", MemberKind::User { scope: UserScope::Operator });
        let bearer = issue_bearer(&signer, &user, "UKEY", NOW, None).unwrap();
        let caller =
            GatewayCaller::verify_bearer(&bearer, &[signer.public_key()], NOW * 2).unwrap();
        assert_eq!((caller.scope, caller.roles.len()), (Some(UserScope::Operator), 0));
    }

    #[test]
    fn a_session_has_the_rights_of_its_caller_and_ends_first() {
        let signer = KeyPair::new_account();
        let signers = [signer.public_key()];
        let user = member("ada", MemberKind::User { scope: UserScope::Operator });
        for (own_end, end, is_recorded) in [
            (None, NOW + 60, false),
            (Some(NOW + 30), NOW + 30, true),
            (Some(NOW + 90), NOW + 60, true),
        ] {
            let bearer = issue_bearer(&signer, &user, "UKEY", NOW, own_end).unwrap();
            let caller = GatewayCaller::verify_bearer(&bearer, &signers, NOW).unwrap();
            let session = issue_session_bearer(&signer, &caller, NOW, NOW + 60).unwrap();
            let seen = GatewayCaller::verify_bearer(&session, &signers, NOW).unwrap();
            assert_eq!(seen, GatewayCaller { expires_at: Some(end), is_recorded, ..caller });
            // A session of a session lasts no longer.
            let second = issue_session_bearer(&signer, &seen, NOW + 5, NOW + 65).unwrap();
            assert_eq!(GatewayCaller::verify_bearer(&second, &signers, NOW + 5).unwrap(), seen);
        }
    }

    #[test]
    fn a_bearer_of_another_fleet_is_foreign_and_one_that_was_changed_too() {
        let (ours, theirs) = (KeyPair::new_account(), KeyPair::new_account());
        let bearer = issue_bearer(&theirs, &agent(), "UKEY", NOW, None).unwrap();
        let refused =
            |text: &str| GatewayCaller::verify_bearer(text, &[ours.public_key()], NOW).unwrap_err();
        assert!(matches!(refused(&bearer), BearerError::Foreign));
        let bearer = issue_bearer(&ours, &agent(), "UKEY", NOW, None).unwrap();
        let other =
            issue_bearer(&ours, &member("box-4", agent().standing), "UKEY", NOW, None).unwrap();
        let (_, signature) = bearer.rsplit_once('.').unwrap();
        let (text, _) = other.rsplit_once('.').unwrap();
        assert!(matches!(refused(&format!("{text}.{signature}")), BearerError::Foreign));
    }

    #[test]
    fn what_is_no_bearer_is_refused_without_a_panic() {
        let signer = KeyPair::new_account();
        let signers = [signer.public_key()];
        let bearer = issue_bearer(&signer, &agent(), "UKEY", NOW, None).unwrap();
        for end in 0..bearer.len() {
            assert!(GatewayCaller::verify_bearer(&bearer[..end], &signers, NOW).is_err(), "{end}");
            let _ = BearerInfo::read_unverified(&bearer[..end]);
        }
        for wrong in ["", ".", "..", "...", "a.b.c", "ä.ö.ü", &"x".repeat(10_000)] {
            assert!(GatewayCaller::verify_bearer(wrong, &signers, NOW).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_token_for_the_bus_does_not_do_for_the_gateway() {
        let signer = KeyPair::new_account();
        let theirs = serde_json::json!({
            "iss": signer.public_key(), "sub": "box-3", "name": "box-3", "key": "U", "iat": NOW,
            "nats": { "type": "user", "version": 2 },
        });
        let jwt = claims::encode_token(&signer, &theirs).unwrap();
        let error = GatewayCaller::verify_bearer(&jwt, &[signer.public_key()], NOW).unwrap_err();
        assert!(matches!(error, BearerError::Malformed), "{error}");
    }
}
