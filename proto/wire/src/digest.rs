//! BLAKE3 digests and their text form: `b3:` and 64 hex digits.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A BLAKE3 hash of 32 bytes, written as `b3:` and 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("digest {0:?} must be \"b3:\" and 64 hex digits (S106)")]
pub struct DigestError(String);

impl Digest {
    pub fn hash_bytes(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the 64 hex digits without the prefix `b3:`, as in file names and for `b3sum`.
    pub fn to_hex(self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Self {
        Self(*hash.as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b3:{}", self.to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = DigestError;
    fn from_str(text: &str) -> Result<Self, DigestError> {
        text.strip_prefix("b3:")
            .and_then(|hex| blake3::Hash::from_hex(hex).ok())
            .map(Self::from)
            .ok_or_else(|| DigestError(text.to_owned()))
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;
    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_reads_back_from_its_text() {
        let digest = Digest::hash_bytes(b"flotilla");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        for bad in ["", "b3:", "b3:zz", &digest.to_hex()] {
            assert!(bad.parse::<Digest>().is_err(), "{bad:?} was accepted");
        }
    }
}
