//! Proves possession of a key without revealing it: a signature over the purpose, the fleet, the
//! member and the time. A verifier only accepts a statement newer than the last one, so that none
//! can be replayed.

use data_encoding::BASE64URL_NOPAD;
use nkeys::KeyPair;
use wire::AgentId;

use crate::{AuthorityError, MemberIdentity, join_token::Fingerprint};

/// The accepted difference between the clocks of two hosts, in milliseconds.
pub const CLOCK_SKEW_MAX_MS: u64 = 300_000;

/// The request that a proof authorises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProofPurpose<'a> {
    /// `token` is the id of the token.
    Join {
        token: &'a str,
    },
    Renew,
}

/// The statement that a member signs.
#[derive(Debug, Clone, Copy)]
pub struct ProofStatement<'a> {
    pub purpose: ProofPurpose<'a>,
    /// The certificate authority of the fleet to which it is addressed.
    pub fleet: Fingerprint,
    pub name: &'a AgentId,
    /// Milliseconds since 1970.
    pub at_ms: u64,
}

/// The reason why a proof is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    #[error(
        "the key {0:?} is not a user nkey; remove the credentials' key.nk and join again (K114)"
    )]
    Key(String),
    #[error(
        "the proof is not signed with the key of {0}; check that its credentials' key.nk belongs to it \
         (K114)"
    )]
    Signature(AgentId),
    #[error(
        "the clocks differ by {seconds} s, the limit is 300 s; set them (timedatectl set-ntp true) \
         (K103)"
    )]
    Skew { seconds: u64 },
}

impl ProofStatement<'_> {
    fn signed_text(&self) -> String {
        let Self { purpose, fleet, name, at_ms } = self;
        let purpose = match purpose {
            ProofPurpose::Join { token } => format!("join {token}"),
            ProofPurpose::Renew => "renew".to_owned(),
        };
        format!("flotilla 1\n{purpose}\n{fleet}\n{name}\n{at_ms}")
    }

    /// Signs the statement with the member's key; returns the signature in base64url.
    pub fn sign_with(&self, member: &MemberIdentity) -> Result<String, AuthorityError> {
        Ok(BASE64URL_NOPAD.encode(&member.sign_bytes(self.signed_text().as_bytes())?))
    }

    /// Checks the signature, and that the statement differs from `now_ms` by at most 300 s.
    pub fn check_signature(
        &self,
        public_key: &str,
        signature: &str,
        now_ms: u64,
    ) -> Result<(), ProofError> {
        let key = parse_user_key(public_key)?;
        let wrong = || ProofError::Signature(self.name.clone());
        let signature = BASE64URL_NOPAD.decode(signature.as_bytes()).map_err(|_| wrong())?;
        key.verify(self.signed_text().as_bytes(), &signature).map_err(|_| wrong())?;
        let apart = now_ms.abs_diff(self.at_ms);
        if apart > CLOCK_SKEW_MAX_MS {
            return Err(ProofError::Skew { seconds: apart / 1000 });
        }
        Ok(())
    }
}

/// Checks that a text is the public nkey of a user, `U…`.
pub fn check_user_key(text: &str) -> Result<(), ProofError> {
    parse_user_key(text).map(|_| ())
}

fn parse_user_key(text: &str) -> Result<KeyPair, ProofError> {
    let wrong = || ProofError::Key(text.chars().take(64).collect());
    if !text.starts_with('U') {
        return Err(wrong());
    }
    KeyPair::from_public_key(text).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000_000;

    /// Creates a member with only a key.
    fn member(directory: &tempfile::TempDir) -> MemberIdentity {
        MemberIdentity::with_default_files("box-3").resolve_in(directory.path())
    }

    #[test]
    fn a_proof_is_good_for_its_key_its_purpose_its_fleet_its_name_and_its_time() {
        let directory = tempfile::tempdir().unwrap();
        let member = member(&directory);
        let key = member.ensure_public_key().unwrap();
        let name = AgentId::new("box-3").unwrap();
        let other = AgentId::new("box-4").unwrap();
        let fleet = Fingerprint::from_der(b"ours");
        let statement =
            ProofStatement { purpose: ProofPurpose::Renew, fleet, name: &name, at_ms: NOW };
        let signature = statement.sign_with(&member).unwrap();
        let check = |statement: ProofStatement<'_>, key: &str, now| {
            statement.check_signature(key, &signature, now)
        };
        check(statement, &key, NOW + CLOCK_SKEW_MAX_MS).unwrap();
        check(statement, &key, NOW - CLOCK_SKEW_MAX_MS).unwrap();
        let late = check(statement, &key, NOW + 400_000).unwrap_err();
        assert!(matches!(late, ProofError::Skew { seconds: 400 }), "{late}");
        for changed in [
            ProofStatement { purpose: ProofPurpose::Join { token: "a" }, ..statement },
            ProofStatement { fleet: Fingerprint::from_der(b"theirs"), ..statement },
            ProofStatement { name: &other, ..statement },
            ProofStatement { at_ms: NOW + 1, ..statement },
        ] {
            assert!(matches!(check(changed, &key, NOW), Err(ProofError::Signature(_))));
        }
        assert!(check(statement, &KeyPair::new_user().public_key(), NOW).is_err());
    }

    #[test]
    fn what_is_no_key_or_no_signature_is_refused_without_a_panic() {
        let name = AgentId::new("box-3").unwrap();
        let fleet = Fingerprint::from_der(b"ours");
        let statement =
            ProofStatement { purpose: ProofPurpose::Renew, fleet, name: &name, at_ms: NOW };
        let account = KeyPair::new_account().public_key();
        for key in ["", "U", "ä", &account, &"U".repeat(56), &"U".repeat(9999)] {
            assert!(
                matches!(statement.check_signature(key, "", NOW), Err(ProofError::Key(_))),
                "{key}"
            );
        }
        let key = KeyPair::new_user().public_key();
        for signature in ["", "ä", "AAAA", &"A".repeat(9999)] {
            assert!(statement.check_signature(&key, signature, NOW).is_err(), "{signature}");
        }
    }
}
