//! What a member has in its directory: its key, and what it was given for it.

use std::path::{Path, PathBuf};

use nkeys::KeyPair;
use serde::{Deserialize, Serialize};

use crate::{FileError, files, keys::AuthorityError};

/// Where a member's files are. In `fleet.json` they are relative to its directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    pub name: String,
    pub key: PathBuf,
    pub jwt: PathBuf,
    pub bearer: PathBuf,
    pub ca: PathBuf,
}

/// What those files hold, but for the key.
#[derive(Debug, Clone)]
pub struct KitFiles<'a> {
    pub jwt: &'a str,
    pub bearer: &'a str,
    pub ca: &'a str,
}

impl Identity {
    /// With the names files of a kit usually have.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            key: "key.nk".into(),
            jwt: "user.jwt".into(),
            bearer: "bearer.jwt".into(),
            ca: "ca.pem".into(),
        }
    }

    /// The same, with paths from wherever the process stands.
    #[must_use]
    pub fn within(&self, directory: &Path) -> Self {
        let at = |path: &PathBuf| directory.join(path);
        Self {
            name: self.name.clone(),
            key: at(&self.key),
            jwt: at(&self.jwt),
            bearer: at(&self.bearer),
            ca: at(&self.ca),
        }
    }

    /// The public key of the one in its file, which is made if there is none: it stays where it
    /// was made.
    ///
    /// # Errors
    /// When it cannot be written, or what is there is no key.
    pub fn public_key(&self) -> Result<String, AuthorityError> {
        if let Some(directory) = self.key.parent() {
            files::private_directory(directory)?;
        }
        if !self.key.exists() {
            let key = KeyPair::new_user();
            files::write_secret(&self.key, seed(&key)?.as_bytes())?;
        }
        Ok(self.key_pair()?.public_key())
    }

    /// Signs with the member's key: how it proves that it is itself.
    ///
    /// # Errors
    /// When there is no key.
    pub fn sign(&self, bytes: &[u8]) -> Result<Vec<u8>, AuthorityError> {
        self.key_pair()?
            .sign(bytes)
            .map_err(|source| AuthorityError::Key { path: self.key.clone(), source })
    }

    /// Writes what the member was given; each file is replaced as a whole.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write(&self, kit: &KitFiles<'_>) -> Result<(), FileError> {
        files::write_secret(&self.jwt, kit.jwt.as_bytes())?;
        files::write_secret(&self.bearer, kit.bearer.as_bytes())?;
        files::write_public(&self.ca, kit.ca.as_bytes())
    }

    /// Key and token in one file, as other NATS clients take them (`nats --creds FILE`).
    ///
    /// # Errors
    /// When one of them cannot be read, or the file cannot be written.
    pub fn write_credentials(&self, path: &Path) -> Result<(), AuthorityError> {
        let (jwt, key) = (self.read_jwt()?, seed(&self.key_pair()?)?);
        let text = credentials(&jwt, &key);
        Ok(files::write_secret(path, text.as_bytes())?)
    }

    /// The newest token for the bus.
    ///
    /// # Errors
    /// When it cannot be read, or others could read it.
    pub fn read_jwt(&self) -> Result<String, FileError> {
        files::read_secret(&self.jwt).map(|text| text.trim().to_owned())
    }

    /// What the gateway is shown.
    ///
    /// # Errors
    /// When it cannot be read, or others could read it.
    pub fn read_bearer(&self) -> Result<String, FileError> {
        files::read_secret(&self.bearer).map(|text| text.trim().to_owned())
    }

    /// The certificate authority, in PEM.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read_ca(&self) -> Result<String, FileError> {
        files::read(&self.ca)
    }

    fn key_pair(&self) -> Result<KeyPair, AuthorityError> {
        key_pair(&self.key)
    }
}

/// As NATS clients have them in one file.
pub(crate) fn credentials(jwt: &str, seed: &str) -> String {
    format!(
        "-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
}

pub(crate) fn key_pair(path: &Path) -> Result<KeyPair, AuthorityError> {
    let seed = files::read_secret(path)?;
    KeyPair::from_seed(seed.trim())
        .map_err(|source| AuthorityError::Key { path: path.to_owned(), source })
}

pub(crate) fn seed(key: &KeyPair) -> Result<String, AuthorityError> {
    key.seed().map_err(AuthorityError::Make)
}
