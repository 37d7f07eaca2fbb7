//! Credentials directories: the key is written first and `fleet.json` last. Without `fleet.json` a
//! directory is incomplete, and joining continues with the same key, so that no token use is spent
//! twice.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use identity::{BearerInfo, CredentialFiles, Fingerprint, JoinToken, MemberIdentity};
use wire::v1;

use crate::fleet::FleetFile;

const TOKEN_ID_FILE: &str = "token.id";

/// Returns the credentials directory below another: `credentials`, or the one that an earlier
/// version created there.
pub(crate) fn find_below(directory: &Path) -> PathBuf {
    let earlier = directory.join("kit");
    if earlier.exists() { earlier } else { directory.join("credentials") }
}

pub(crate) fn prepare_credentials(directory: &Path, name: &str) -> anyhow::Result<MemberIdentity> {
    match FleetFile::read(directory)? {
        Some(FleetFile { identity: Some(identity), .. }) if identity.name == name => {}
        Some(FleetFile { identity: Some(identity), .. }) => bail!(
            "{} has the credentials of {}; choose another directory, or remove that one (K105)",
            directory.display(),
            identity.name
        ),
        Some(_) => bail!(
            "{} is an open fleet's directory; choose another for the credentials (K105)",
            directory.display()
        ),
        None => {}
    }
    Ok(MemberIdentity::with_default_files(name).resolve_in(directory))
}

/// A key that was created for a request. Unless it is kept, it is removed again, with the
/// directories that were created for it.
pub(super) struct PendingKey {
    /// `None` if the key was there before.
    key: Option<PathBuf>,
    /// Innermost first.
    directories: Vec<PathBuf>,
}

impl PendingKey {
    /// Creates the key if it is missing, and returns its public key.
    pub(super) fn create(identity: &MemberIdentity) -> anyhow::Result<(Self, String)> {
        let above = identity.key.ancestors().skip(1);
        let missing = above.take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let directories = missing.map(Path::to_owned).collect();
        let key = (!identity.key.exists()).then(|| identity.key.clone());
        let pending = Self { key, directories };
        let public_key = identity.ensure_public_key()?;
        Ok((pending, public_key))
    }

    pub(super) fn keep(mut self) {
        self.key = None;
        self.directories.clear();
    }
}

impl Drop for PendingKey {
    fn drop(&mut self) {
        if let Some(key) = &self.key {
            // What cannot be removed does no harm.
            let _ = std::fs::remove_file(key);
        }
        for directory in &self.directories {
            let _ = std::fs::remove_dir(directory);
        }
    }
}

/// Returns the member that this token admitted here before. An empty line matches any member: a
/// restarted container may or may not pass its token again.
pub(super) fn find_joined_member(directory: &Path, line: &str) -> anyhow::Result<Option<String>> {
    let Some((_, identity)) = FleetFile::read_member(directory)? else { return Ok(None) };
    if line.trim().is_empty() {
        return Ok(Some(identity.name));
    }
    let token: JoinToken = line.parse()?;
    let of_this_fleet = match identity.read_ca() {
        Ok(ca) => Fingerprint::from_pem(&ca)? == token.ca,
        Err(_) => false,
    };
    let shown = std::fs::read_to_string(directory.join(TOKEN_ID_FILE)).unwrap_or_default();
    Ok((of_this_fleet && shown.trim() == token.id).then_some(identity.name))
}

pub(super) fn record_token(directory: &Path, token: &JoinToken) -> anyhow::Result<()> {
    let path = directory.join(TOKEN_ID_FILE);
    std::fs::write(&path, &token.id).with_context(|| format!("write {}", path.display()))
}

pub(crate) fn write_credentials(
    directory: &Path,
    membership: &v1::Membership,
    gateway: &str,
) -> anyhow::Result<()> {
    let identity = MemberIdentity::with_default_files(&membership.name);
    let within = identity.resolve_in(directory);
    let files = CredentialFiles {
        jwt: &membership.user_jwt,
        bearer: &membership.bearer,
        ca: &membership.ca_pem,
    };
    within
        .write_files(&files)
        .with_context(|| format!("write the credentials {}", directory.display()))?;
    let file = FleetFile {
        nats: membership.nats.join(","),
        gateway: gateway.to_owned(),
        store: membership.store.clone(),
        pid: 0,
        agents: Vec::new(),
        identity: Some(identity),
    };
    file.write(directory)
}

/// Returns what the credentials in a directory grant; `None` if the fleet is open.
pub(crate) fn read_grant(directory: &Path) -> anyhow::Result<Option<BearerInfo>> {
    let Some((_, identity)) = FleetFile::read_member(directory)? else { return Ok(None) };
    let bearer = identity.read_bearer()?;
    let grant = BearerInfo::read_unverified(&bearer);
    grant.map(Some).with_context(|| format!("read the credentials {}", directory.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_not_kept_leaves_nothing_behind() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path().join("new/ann");
        let identity = MemberIdentity::with_default_files("ann").resolve_in(&at);
        let (pending, _) = PendingKey::create(&identity).unwrap();
        assert!(identity.key.exists());
        drop(pending);
        assert!(!directory.path().join("new").exists());
        let (pending, kept) = PendingKey::create(&identity).unwrap();
        pending.keep();
        // A key of an earlier call stays, also if this call fails.
        let (pending, again) = PendingKey::create(&identity).unwrap();
        drop(pending);
        assert!(identity.key.exists() && kept == again);
    }
}
