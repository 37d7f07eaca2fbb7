//! What the gateway is shown: who calls, as what, and until when. The same tokens as NATS's,
//! signed by the same key, and yet neither does for the other: ours say for whom they are.

use std::collections::BTreeSet;

use nkeys::KeyPair;
use serde::{Deserialize, Serialize};
use wire::{AgentId, Pool};

use crate::{
    Member, Role, Scope, Standing,
    claims::{self, ClaimsError},
};

/// What a NATS user JWT does not say, though it is signed alike.
const AUDIENCE: &str = "flotilla-gateway";
/// A longer one is nobody's.
const BYTES_MAX: usize = 4096;
/// What the clocks of two boxes may differ by.
const SKEW_S: u64 = 300;

/// Who calls the gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub name: AgentId,
    /// Of users; agents have none.
    pub scope: Option<Scope>,
    /// Of agents; users have none.
    pub roles: BTreeSet<Role>,
    /// The public key of the member this was made for.
    pub key: String,
    /// In seconds since 1970; `None` for the fleet's own.
    pub expires_at: Option<u64>,
}

/// What a bearer says to its holder, who cannot check it and need not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    pub name: AgentId,
    pub scope: Option<Scope>,
    pub roles: BTreeSet<Role>,
    /// Of agents.
    pub pool: Option<Pool>,
}

#[derive(Debug, thiserror::Error)]
pub enum BearerError {
    #[error(
        "the bearer is not one of a fleet's: write `authorization: Bearer …` with what the kit's bearer.jwt holds (K102)"
    )]
    Malformed,
    #[error("the bearer is not this fleet's; use the kit that was made for this fleet (K102)")]
    Foreign,
    #[error(
        "the bearer expired {seconds} s ago; an agent renews it by itself while it runs, and for users `flotilla user create` makes a new kit (K103)"
    )]
    Expired { seconds: u64 },
    #[error(
        "the bearer was made {seconds} s in the future; set this machine's clock or the one of the bus host (timedatectl set-ntp true) (K103)"
    )]
    Early { seconds: u64 },
}

#[derive(Debug, Serialize, Deserialize)]
struct Claims {
    aud: String,
    iss: String,
    /// The member's name.
    sub: String,
    key: String,
    iat: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    exp: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scope: Option<Scope>,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    roles: BTreeSet<Role>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pool: Option<Pool>,
}

/// A bearer for a member whose public key is `key`.
pub(crate) fn mint(
    signer: &KeyPair,
    member: &Member,
    key: &str,
    now: u64,
    expires_at: Option<u64>,
) -> Result<String, ClaimsError> {
    let (scope, roles, pool) = match &member.standing {
        Standing::Agent { roles, pool } => (None, roles.clone(), Some(pool.clone())),
        Standing::User { scope } => (Some(*scope), BTreeSet::new(), None),
        Standing::Coordinator => (None, BTreeSet::new(), None),
    };
    let claims = Claims {
        aud: AUDIENCE.to_owned(),
        iss: signer.public_key(),
        sub: member.name.to_string(),
        key: key.to_owned(),
        iat: now,
        exp: expires_at,
        scope,
        roles,
        pool,
    };
    claims::encode(signer, &claims)
}

impl Shown {
    /// # Errors
    /// When it is no bearer.
    pub fn read(bearer: &str) -> Result<Self, BearerError> {
        if bearer.len() > BYTES_MAX {
            return Err(BearerError::Malformed);
        }
        let claims: Claims = claims::decode(bearer).map_err(|_| BearerError::Malformed)?;
        let Claims { sub, scope, roles, pool, .. } = claims;
        let name = AgentId::new(sub).map_err(|_| BearerError::Malformed)?;
        Ok(Self { name, scope, roles, pool })
    }
}

impl Caller {
    /// Who shows this, if one of `signers` (public keys) said so and it is still true. Whether the
    /// member was revoked since is not to be seen from it.
    ///
    /// # Errors
    /// When it is not a bearer, not this fleet's, or not of this time.
    pub fn of(bearer: &str, signers: &[String], now: u64) -> Result<Self, BearerError> {
        if bearer.len() > BYTES_MAX {
            return Err(BearerError::Malformed);
        }
        let claims: Claims = claims::verified(bearer, signers).map_err(|error| match error {
            ClaimsError::Signature => BearerError::Foreign,
            _ => BearerError::Malformed,
        })?;
        if claims.aud != AUDIENCE {
            return Err(BearerError::Malformed);
        }
        if let Some(seconds) = claims.iat.checked_sub(now.saturating_add(SKEW_S + 1)) {
            return Err(BearerError::Early { seconds: seconds.saturating_add(SKEW_S + 1) });
        }
        if let Some(seconds) = claims.exp.and_then(|exp| now.checked_sub(exp)) {
            return Err(BearerError::Expired { seconds });
        }
        Ok(Self {
            name: AgentId::new(claims.sub).map_err(|_| BearerError::Malformed)?,
            scope: claims.scope,
            roles: claims.roles,
            key: claims.key,
            expires_at: claims.exp,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn member(name: &str, standing: Standing) -> Member {
        Member { name: AgentId::new(name).unwrap(), standing }
    }

    fn agent() -> Member {
        let roles = [Role::Generator, Role::Evaluator].into();
        member("box-3", Standing::Agent { roles, pool: "default".parse().unwrap() })
    }

    #[test]
    fn a_bearer_says_who_calls_until_it_expires() {
        let signer = KeyPair::new_account();
        let signers = [signer.public_key()];
        let bearer = mint(&signer, &agent(), "UKEY", NOW, Some(NOW + 60)).unwrap();
        let caller = Caller::of(&bearer, &signers, NOW + 59).unwrap();
        assert_eq!((caller.name.as_str(), caller.scope), ("box-3", None));
        assert_eq!(caller.roles, [Role::Generator, Role::Evaluator].into());
        assert_eq!((caller.key.as_str(), caller.expires_at), ("UKEY", Some(NOW + 60)));
        let shown = Shown::read(&bearer).unwrap();
        assert_eq!((shown.roles, shown.pool.unwrap().as_str()), (caller.roles, "default"));
        let error = Caller::of(&bearer, &signers, NOW + 63).unwrap_err();
        assert!(matches!(error, BearerError::Expired { seconds: 3 }), "{error}");
        Caller::of(&bearer, &signers, NOW - SKEW_S).unwrap();
        let error = Caller::of(&bearer, &signers, NOW - SKEW_S - 1).unwrap_err();
        assert!(matches!(error, BearerError::Early { seconds: 301 }), "{error}");
    }

    #[test]
    fn a_user_has_a_scope_and_no_roles() {
        let signer = KeyPair::new_account();
        let user = member("ada", Standing::User { scope: Scope::Operator });
        let bearer = mint(&signer, &user, "UKEY", NOW, None).unwrap();
        let caller = Caller::of(&bearer, &[signer.public_key()], NOW * 2).unwrap();
        assert_eq!((caller.scope, caller.roles.len()), (Some(Scope::Operator), 0));
    }

    #[test]
    fn a_bearer_of_another_fleet_is_foreign_and_one_that_was_changed_too() {
        let (ours, theirs) = (KeyPair::new_account(), KeyPair::new_account());
        let bearer = mint(&theirs, &agent(), "UKEY", NOW, None).unwrap();
        let refused = |text: &str| Caller::of(text, &[ours.public_key()], NOW).unwrap_err();
        assert!(matches!(refused(&bearer), BearerError::Foreign));
        let bearer = mint(&ours, &agent(), "UKEY", NOW, None).unwrap();
        let other = mint(&ours, &member("box-4", agent().standing), "UKEY", NOW, None).unwrap();
        let (_, signature) = bearer.rsplit_once('.').unwrap();
        let (text, _) = other.rsplit_once('.').unwrap();
        assert!(matches!(refused(&format!("{text}.{signature}")), BearerError::Foreign));
    }

    #[test]
    fn what_is_no_bearer_is_refused_without_a_panic() {
        let signer = KeyPair::new_account();
        let signers = [signer.public_key()];
        let bearer = mint(&signer, &agent(), "UKEY", NOW, None).unwrap();
        for end in 0..bearer.len() {
            assert!(Caller::of(&bearer[..end], &signers, NOW).is_err(), "{end}");
            let _ = Shown::read(&bearer[..end]);
        }
        for wrong in ["", ".", "..", "...", "a.b.c", "ä.ö.ü", &"x".repeat(10_000)] {
            assert!(Caller::of(wrong, &signers, NOW).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_token_for_the_bus_does_not_do_for_the_gateway() {
        let signer = KeyPair::new_account();
        let theirs = serde_json::json!({
            "iss": signer.public_key(), "sub": "box-3", "name": "box-3", "key": "U", "iat": NOW,
            "nats": { "type": "user", "version": 2 },
        });
        let jwt = claims::encode(&signer, &theirs).unwrap();
        let error = Caller::of(&jwt, &[signer.public_key()], NOW).unwrap_err();
        assert!(matches!(error, BearerError::Malformed), "{error}");
    }
}
