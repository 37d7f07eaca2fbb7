//! The credentials of a member in its directory: its key and the tokens issued for it.

use std::path::{Path, PathBuf};

use nkeys::KeyPair;
use serde::{Deserialize, Serialize};

use crate::{AuthorityError, KeyFileError, files};

/// The names of a member's credential files. In `fleet.json` the paths are relative to its
/// directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberIdentity {
    pub name: String,
    /// The nkey seed; it never leaves the host.
    pub key: PathBuf,
    /// The user JWT for the bus.
    pub jwt: PathBuf,
    /// The bearer token for the gateway.
    pub bearer: PathBuf,
    pub ca: PathBuf,
}

#[derive(Debug, Clone)]
pub struct CredentialFiles<'a> {
    pub jwt: &'a str,
    pub bearer: &'a str,
    pub ca: &'a str,
}

impl MemberIdentity {
    pub fn with_default_files(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            key: "key.nk".into(),
            jwt: "user.jwt".into(),
            bearer: "bearer.jwt".into(),
            ca: "ca.pem".into(),
        }
    }

    /// Resolves the paths against `directory`.
    #[must_use]
    pub fn resolve_in(&self, directory: &Path) -> Self {
        let at = |path: &PathBuf| directory.join(path);
        Self {
            name: self.name.clone(),
            key: at(&self.key),
            jwt: at(&self.jwt),
            bearer: at(&self.bearer),
            ca: at(&self.ca),
        }
    }

    /// Returns the member's public key; creates the key file if it is missing.
    pub fn ensure_public_key(&self) -> Result<String, AuthorityError> {
        if let Some(directory) = self.key.parent() {
            files::create_private_directory(directory)?;
        }
        if !self.key.exists() {
            let key = KeyPair::new_user();
            files::write_secret(&self.key, encode_seed(&key)?.as_bytes())?;
        }
        Ok(self.load_key_pair()?.public_key())
    }

    /// Signs `bytes` with the member's key, which proves its identity.
    pub fn sign_bytes(&self, bytes: &[u8]) -> Result<Vec<u8>, AuthorityError> {
        self.load_key_pair()?
            .sign(bytes)
            .map_err(|source| AuthorityError::Key { path: self.key.clone(), source })
    }

    /// Writes the issued tokens and the certificate authority; each file is replaced atomically.
    pub fn write_files(&self, credentials: &CredentialFiles<'_>) -> Result<(), KeyFileError> {
        files::write_secret(&self.jwt, credentials.jwt.as_bytes())?;
        files::write_secret(&self.bearer, credentials.bearer.as_bytes())?;
        files::write_public(&self.ca, credentials.ca.as_bytes())
    }

    /// Writes key and token into one file, in the format of other NATS clients (`nats --creds
    /// FILE`).
    pub fn write_creds_file(&self, path: &Path) -> Result<(), AuthorityError> {
        let (jwt, key) = (self.read_jwt()?, encode_seed(&self.load_key_pair()?)?);
        let text = format_credentials(&jwt, &key);
        Ok(files::write_secret(path, text.as_bytes())?)
    }

    /// Reads the user JWT for the bus. Fails if other users of the host can read the file.
    pub fn read_jwt(&self) -> Result<String, KeyFileError> {
        files::read_secret(&self.jwt).map(|text| text.trim().to_owned())
    }

    /// Reads the bearer token for the gateway. Fails if other users of the host can read the file.
    pub fn read_bearer(&self) -> Result<String, KeyFileError> {
        files::read_secret(&self.bearer).map(|text| text.trim().to_owned())
    }

    /// Reads the certificate authority, in PEM.
    pub fn read_ca(&self) -> Result<String, KeyFileError> {
        files::read_text(&self.ca)
    }

    fn load_key_pair(&self) -> Result<KeyPair, AuthorityError> {
        read_key_pair(&self.key)
    }
}

/// Returns the text of a `.creds` file of NATS clients.
pub(crate) fn format_credentials(jwt: &str, seed: &str) -> String {
    format!(
        "-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
}

pub(crate) fn read_key_pair(path: &Path) -> Result<KeyPair, AuthorityError> {
    let seed = files::read_secret(path)?;
    KeyPair::from_seed(seed.trim())
        .map_err(|source| AuthorityError::Key { path: path.to_owned(), source })
}

pub(crate) fn encode_seed(key: &KeyPair) -> Result<String, AuthorityError> {
    key.seed().map_err(AuthorityError::Make)
}
