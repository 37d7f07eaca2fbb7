//! One-time codes with which the web page signs in as the user who asked for a link. They are in
//! memory only, as hashes: a restart of the gateway invalidates the unused ones.

use std::{
    collections::BTreeMap,
    sync::PoisonError,
    time::{Duration, Instant},
};

use identity::{GatewayCaller, join_token};
use wire::{AgentId, clock, v1};

use super::{MemberRegistry, MembershipError, MembershipRefusal};

/// Enough to open a browser, on another machine too.
const CODE_LIFETIME: Duration = Duration::from_secs(10 * 60);
/// Unused codes of one member; a further one replaces its oldest.
const CODES_PER_MEMBER: usize = 8;
const CODES_MAX: usize = 1024;
/// A page signs in again once a day.
const SESSION_S: u64 = 12 * 3600;

/// The unused codes, by their hash. A code is removed when it is exchanged.
#[derive(Debug, Default)]
pub(super) struct LoginCodes {
    codes: BTreeMap<String, PendingLogin>,
}

#[derive(Debug)]
struct PendingLogin {
    caller: GatewayCaller,
    expires_at: Instant,
}

impl LoginCodes {
    /// Stores a code for a caller. Fails if there are too many of other members.
    fn insert_code(
        &mut self,
        code: &str,
        caller: GatewayCaller,
        now: Instant,
    ) -> Result<(), MembershipRefusal> {
        self.codes.retain(|_, pending| pending.expires_at > now);
        if self.count_codes(&caller.name) >= CODES_PER_MEMBER {
            self.remove_oldest(&caller.name);
        }
        if self.codes.len() >= CODES_MAX {
            return Err(MembershipRefusal::TooManyLoginCodes);
        }
        let pending = PendingLogin { caller, expires_at: now + CODE_LIFETIME };
        self.codes.insert(join_token::hash_secret(code), pending);
        Ok(())
    }

    /// Removes a code and returns the caller that it was made for.
    fn take_code(&mut self, code: &str, now: Instant) -> Result<GatewayCaller, MembershipRefusal> {
        let pending = self.codes.remove(&join_token::hash_secret(code));
        let pending = pending.filter(|pending| pending.expires_at > now);
        pending.map(|pending| pending.caller).ok_or(MembershipRefusal::UnknownLoginCode)
    }

    fn count_codes(&self, member: &AgentId) -> usize {
        self.codes.values().filter(|pending| pending.caller.name == *member).count()
    }

    fn remove_oldest(&mut self, member: &AgentId) {
        let own = self.codes.iter().filter(|(_, pending)| pending.caller.name == *member);
        let oldest = own.min_by_key(|(_, pending)| pending.expires_at);
        if let Some(hash) = oldest.map(|(hash, _)| hash.clone()) {
            self.codes.remove(&hash);
        }
    }
}

impl MemberRegistry {
    /// Creates a one-time code that signs a page in as this caller.
    pub fn create_login_code(
        &self,
        caller: GatewayCaller,
    ) -> Result<v1::LoginCode, MembershipError> {
        let (_, code) = join_token::generate_id_and_secret()?;
        let expires_ms = clock::unix_time() + CODE_LIFETIME;
        self.lock_login_codes().insert_code(&code, caller, Instant::now())?;
        Ok(v1::LoginCode { code, expires_at: Some(wire::to_timestamp(expires_ms)) })
    }

    /// Exchanges a code for a bearer with the rights of the caller that it was made for. It ends
    /// after half a day, or with the caller's own bearer.
    pub fn exchange_login_code(&self, code: &str) -> Result<v1::LoginSession, MembershipError> {
        let caller = self.lock_login_codes().take_code(code, Instant::now())?;
        let now = clock::unix_seconds();
        let bearer = self.open_authority()?.issue_session_bearer(&caller, now, now + SESSION_S)?;
        tracing::info!(name = %caller.name, "signed in on the page");
        Ok(v1::LoginSession { bearer })
    }

    fn lock_login_codes(&self) -> std::sync::MutexGuard<'_, LoginCodes> {
        // The codes remain usable after a panic of another thread.
        self.shared.login_codes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use identity::UserScope;

    use super::*;

    fn caller(name: &str) -> GatewayCaller {
        GatewayCaller {
            name: name.parse().unwrap(),
            scope: Some(UserScope::Reader),
            roles: [].into(),
            public_key: "UKEY".into(),
            expires_at: None,
            is_recorded: false,
        }
    }

    #[test]
    fn a_code_works_once_and_only_for_ten_minutes() {
        let (mut codes, now) = (LoginCodes::default(), Instant::now());
        codes.insert_code("first", caller("ada"), now).unwrap();
        codes.insert_code("second", caller("bob"), now).unwrap();
        assert!(codes.take_code("third", now).is_err());
        assert_eq!(codes.take_code("first", now).unwrap(), caller("ada"));
        assert!(codes.take_code("first", now).is_err(), "it was used");
        let late = now + CODE_LIFETIME;
        assert!(codes.take_code("second", late).is_err(), "it expired");
        codes.insert_code("fourth", caller("bob"), late).unwrap();
        assert!(codes.take_code("fourth", late + CODE_LIFETIME / 2).is_ok());
    }

    #[test]
    fn no_code_is_kept_in_clear() {
        let mut codes = LoginCodes::default();
        codes.insert_code("the secret", caller("ada"), Instant::now()).unwrap();
        assert!(!format!("{codes:?}").contains("the secret"));
    }

    #[test]
    fn a_member_replaces_its_own_codes_and_all_together_are_bounded() {
        let (mut codes, now) = (LoginCodes::default(), Instant::now());
        codes.insert_code("other", caller("bob"), now).unwrap();
        for number in 0..=CODES_PER_MEMBER {
            let at = now + Duration::from_secs(number as u64);
            codes.insert_code(&format!("code {number}"), caller("ada"), at).unwrap();
        }
        assert!(codes.take_code("code 0", now).is_err(), "the oldest made room");
        assert_eq!(codes.count_codes(&caller("ada").name), CODES_PER_MEMBER);
        for number in codes.codes.len()..CODES_MAX {
            let name = format!("user-{number}");
            codes.insert_code(&name, caller(&name), now).unwrap();
        }
        assert!(codes.insert_code("more", caller("carl"), now).is_err());
        assert!(codes.take_code("other", now).is_ok(), "no member removes another's");
        let later = now + CODE_LIFETIME * 2;
        codes.insert_code("later", caller("carl"), later).unwrap();
        assert_eq!(codes.codes.len(), 1, "expired ones are removed");
    }
}
