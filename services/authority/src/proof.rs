//! Showing that one has a key without showing the key: a signature over what is asked for, by
//! whom, and when. What asks must be newer than what asked last, so none works twice.

use data_encoding::BASE64URL_NOPAD;
use nkeys::KeyPair;
use wire::AgentId;

use crate::{AuthorityError, Identity, join_token::Fingerprint};

/// What the clocks of two boxes may differ by.
pub const SKEW_MS: u64 = 300_000;

/// What is signed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose<'a> {
    /// With the token of this id.
    Join {
        token: &'a str,
    },
    Renew,
}

/// Who signs it, and when.
#[derive(Debug, Clone, Copy)]
pub struct Statement<'a> {
    pub purpose: Purpose<'a>,
    /// The fleet it is meant for.
    pub fleet: Fingerprint,
    pub name: &'a AgentId,
    /// In milliseconds since 1970.
    pub at_ms: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    #[error("the key {0:?} is no nkey of a user; remove the kit's key.nk and join again (K114)")]
    Key(String),
    #[error(
        "the proof is not signed with the key of {0}; its kit's key.nk may be another's (K114)"
    )]
    Signature(AgentId),
    #[error(
        "the clocks differ by {seconds} s, and 300 are too many; set them (timedatectl set-ntp true) (K103)"
    )]
    Skew { seconds: u64 },
}

impl Statement<'_> {
    fn text(&self) -> String {
        let Self { purpose, fleet, name, at_ms } = self;
        let purpose = match purpose {
            Purpose::Join { token } => format!("join {token}"),
            Purpose::Renew => "renew".to_owned(),
        };
        format!("flotilla 1\n{purpose}\n{fleet}\n{name}\n{at_ms}")
    }

    /// # Errors
    /// When the member has no key.
    pub fn sign(&self, member: &Identity) -> Result<String, AuthorityError> {
        Ok(BASE64URL_NOPAD.encode(&member.sign(self.text().as_bytes())?))
    }

    /// Whether `signature` is by `public_key` and of this time.
    ///
    /// # Errors
    /// When it is not, saying why.
    pub fn check(&self, public_key: &str, signature: &str, now_ms: u64) -> Result<(), ProofError> {
        let key = user_key(public_key)?;
        let wrong = || ProofError::Signature(self.name.clone());
        let signature = BASE64URL_NOPAD.decode(signature.as_bytes()).map_err(|_| wrong())?;
        key.verify(self.text().as_bytes(), &signature).map_err(|_| wrong())?;
        let apart = now_ms.abs_diff(self.at_ms);
        if apart > SKEW_MS {
            return Err(ProofError::Skew { seconds: apart / 1000 });
        }
        Ok(())
    }
}

/// Whether this is the public key of a user, as NATS writes it.
///
/// # Errors
/// When it is not.
pub fn check_user_key(text: &str) -> Result<(), ProofError> {
    user_key(text).map(|_| ())
}

fn user_key(text: &str) -> Result<KeyPair, ProofError> {
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

    /// A member that has nothing but a key.
    fn member(directory: &tempfile::TempDir) -> Identity {
        Identity::named("box-3").within(directory.path())
    }

    #[test]
    fn a_proof_is_good_for_its_key_its_purpose_its_fleet_its_name_and_its_time() {
        let directory = tempfile::tempdir().unwrap();
        let member = member(&directory);
        let key = member.public_key().unwrap();
        let name = AgentId::new("box-3").unwrap();
        let other = AgentId::new("box-4").unwrap();
        let fleet = Fingerprint::of(b"ours");
        let statement = Statement { purpose: Purpose::Renew, fleet, name: &name, at_ms: NOW };
        let signature = statement.sign(&member).unwrap();
        let check =
            |statement: Statement<'_>, key: &str, now| statement.check(key, &signature, now);
        check(statement, &key, NOW + SKEW_MS).unwrap();
        check(statement, &key, NOW - SKEW_MS).unwrap();
        let late = check(statement, &key, NOW + 400_000).unwrap_err();
        assert!(matches!(late, ProofError::Skew { seconds: 400 }), "{late}");
        for changed in [
            Statement { purpose: Purpose::Join { token: "a" }, ..statement },
            Statement { fleet: Fingerprint::of(b"theirs"), ..statement },
            Statement { name: &other, ..statement },
            Statement { at_ms: NOW + 1, ..statement },
        ] {
            assert!(matches!(check(changed, &key, NOW), Err(ProofError::Signature(_))));
        }
        assert!(check(statement, &KeyPair::new_user().public_key(), NOW).is_err());
    }

    #[test]
    fn what_is_no_key_or_no_signature_is_refused_without_a_panic() {
        let name = AgentId::new("box-3").unwrap();
        let fleet = Fingerprint::of(b"ours");
        let statement = Statement { purpose: Purpose::Renew, fleet, name: &name, at_ms: NOW };
        let account = KeyPair::new_account().public_key();
        for key in ["", "U", "ä", &account, &"U".repeat(56), &"U".repeat(9999)] {
            assert!(matches!(statement.check(key, "", NOW), Err(ProofError::Key(_))), "{key}");
        }
        let key = KeyPair::new_user().public_key();
        for signature in ["", "ä", "AAAA", &"A".repeat(9999)] {
            assert!(statement.check(&key, signature, NOW).is_err(), "{signature}");
        }
    }
}
