//! Join tokens: one line with the gateways, the fingerprint of the fleet's certificate authority,
//! and a secret that is valid for a number of joins. `flotilla1.<base64url>`.

use std::{fmt, str::FromStr};

use data_encoding::{BASE64URL_NOPAD, HEXLOWER};
use ring::{
    digest,
    rand::{SecureRandom, SystemRandom},
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde::{Deserialize, Serialize};

const PREFIX: &str = "flotilla";
const VERSION: &str = "1";
const TOKEN_BYTES_MAX: usize = 4096;
const GATEWAYS_MAX: usize = 16;
const SECRET_BYTES: usize = 24;
const ID_BYTES: usize = 5;

/// A token that lets a host join the fleet (`flotilla join`). `Debug` hides the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// `host:port`; the first that answers is used. If empty, the gateway is searched on the local
    /// network.
    pub gateways: Vec<String>,
    pub ca: Fingerprint,
    /// 1 to 32 letters and digits.
    pub id: String,
    /// The fleet stores only its hash.
    pub secret: String,
    /// In seconds since 1970.
    pub expires_at: u64,
}

/// The SHA-256 hash of a certificate.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fingerprint([u8; 32]);

/// The reason why a text is not a usable join token.
#[derive(Debug, thiserror::Error)]
pub enum JoinTokenError {
    #[error(
        "this is not a join token: a token is one line that begins with flotilla1.; `flotilla \
         token create` makes one (K106)"
    )]
    Alien,
    #[error(
        "this join token is of version {0}, and this flotilla reads version {VERSION}; install the fleet's version here (K106)"
    )]
    Version(String),
    #[error("this join token is damaged ({0}); copy the whole line again (K106)")]
    Damaged(&'static str),
}

/// The JSON inside a join token: gateways, CA fingerprint, id, secret, expiry.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct JoinTokenContent {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    g: Vec<String>,
    c: String,
    i: String,
    s: String,
    e: u64,
}

impl JoinToken {
    /// Returns the token as one line, including the secret.
    pub fn encode_token(&self) -> String {
        let content = JoinTokenContent {
            g: self.gateways.clone(),
            c: self.ca.to_string(),
            i: self.id.clone(),
            s: self.secret.clone(),
            e: self.expires_at,
        };
        let json = serde_json::to_vec(&content).expect("strings and a number are JSON");
        format!("{PREFIX}{VERSION}.{}", BASE64URL_NOPAD.encode(&json))
    }
}

impl FromStr for JoinToken {
    type Err = JoinTokenError;

    fn from_str(text: &str) -> Result<Self, JoinTokenError> {
        let text = text.trim();
        let (version, body) = text
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split_once('.'))
            .filter(|(version, _)| is_version_number(version))
            .ok_or(JoinTokenError::Alien)?;
        if version != VERSION {
            return Err(JoinTokenError::Version(version.to_owned()));
        }
        if text.len() > TOKEN_BYTES_MAX {
            return Err(JoinTokenError::Damaged("it is too long"));
        }
        let json = BASE64URL_NOPAD.decode(body.as_bytes());
        let json = json.map_err(|_| JoinTokenError::Damaged("it was cut or changed"))?;
        let content: JoinTokenContent = serde_json::from_slice(&json)
            .map_err(|_| JoinTokenError::Damaged("it was cut or changed"))?;
        let JoinTokenContent { g: gateways, c: ca, i: id, s: secret, e: expires_at } = content;
        if gateways.len() > GATEWAYS_MAX {
            return Err(JoinTokenError::Damaged("it names too many gateways"));
        }
        if !is_token_id(&id) || secret.is_empty() {
            return Err(JoinTokenError::Damaged("its secret is not valid"));
        }
        let ca = ca.parse().map_err(|_| JoinTokenError::Damaged("its certificate is not valid"))?;
        Ok(Self { gateways, ca, id, secret, expires_at })
    }
}

fn is_version_number(text: &str) -> bool {
    (1..=4).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns true for the id of a token, which is part of a key of the members' bucket.
pub fn is_token_id(text: &str) -> bool {
    (1..=32).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gateways, ca, id, expires_at, secret: _ } = self;
        f.debug_struct("JoinToken")
            .field("gateways", gateways)
            .field("ca", ca)
            .field("id", id)
            .field("expires_at", expires_at)
            .finish_non_exhaustive()
    }
}

impl Fingerprint {
    /// Computes the fingerprint of a certificate in DER form.
    pub fn from_der(certificate: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest::digest(&digest::SHA256, certificate).as_ref());
        Self(bytes)
    }

    /// Computes the fingerprint of the first certificate in a PEM text.
    pub fn from_pem(pem: &str) -> Result<Self, JoinTokenError> {
        let damaged = |_| JoinTokenError::Damaged("the authority is not a certificate");
        CertificateDer::from_pem_slice(pem.as_bytes())
            .map(|der| Self::from_der(&der))
            .map_err(damaged)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&HEXLOWER.encode(&self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = JoinTokenError;

    fn from_str(text: &str) -> Result<Self, JoinTokenError> {
        let damaged = || JoinTokenError::Damaged("a fingerprint is 64 hexadecimal digits");
        let bytes = HEXLOWER.decode(text.as_bytes()).map_err(|_| damaged())?;
        Ok(Self(bytes.try_into().map_err(|_| damaged())?))
    }
}

/// Generates the id and the secret of a new token.
pub fn generate_id_and_secret() -> Result<(String, String), RandomnessError> {
    let id = HEXLOWER.encode(&random_bytes::<ID_BYTES>()?);
    Ok((id, BASE64URL_NOPAD.encode(&random_bytes::<SECRET_BYTES>()?)))
}

/// Returns the hash of a secret, as the fleet stores it: SHA-256 in 64 hex digits.
pub fn hash_secret(secret: &str) -> String {
    HEXLOWER.encode(digest::digest(&digest::SHA256, secret.as_bytes()).as_ref())
}

/// The operating system provided no random numbers.
#[derive(Debug, thiserror::Error)]
#[error("the operating system gives no random numbers (F105)")]
pub struct RandomnessError;

pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N], RandomnessError> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| RandomnessError)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> JoinToken {
        let (id, secret) = generate_id_and_secret().unwrap();
        JoinToken {
            gateways: vec!["bus:7070".into(), "[fd00::1]:7070".into()],
            ca: Fingerprint::from_der(b"a certificate"),
            id,
            secret,
            expires_at: 1_800_000_000,
        }
    }

    #[test]
    fn a_join_token_is_one_line_that_reads_back() {
        let token = token();
        let line = token.encode_token();
        assert!(line.starts_with("flotilla1.") && !line.contains(char::is_whitespace), "{line}");
        assert_eq!(line.parse::<JoinToken>().unwrap(), token);
        assert_eq!(format!(" {line}\n").parse::<JoinToken>().unwrap(), token);
    }

    #[test]
    fn no_cut_or_changed_token_is_taken_for_one_and_none_panics() {
        let line = token().encode_token();
        for end in 0..line.len() {
            assert!(line[..end].parse::<JoinToken>().is_err(), "{end}");
        }
        for wrong in
            ["", "flotilla", "flotilla1", "flotilla1.", "flotilla1.e30", "flotilla1.ä", "k3s.x"]
        {
            assert!(wrong.parse::<JoinToken>().is_err(), "{wrong}");
        }
        let long = format!("flotilla1.{}", "A".repeat(10_000));
        assert!(long.parse::<JoinToken>().is_err());
    }

    #[test]
    fn another_version_differs_from_other_text() {
        let error = "flotilla2.abc".parse::<JoinToken>().unwrap_err().to_string();
        assert!(error.contains("version 2"), "{error}");
        let error = "K10abc".parse::<JoinToken>().unwrap_err().to_string();
        assert!(error.contains("flotilla token create"), "{error}");
    }

    #[test]
    fn what_is_logged_of_a_token_does_not_hold_its_secret() {
        let token = token();
        assert!(!format!("{token:?}").contains(&token.secret));
    }
}
