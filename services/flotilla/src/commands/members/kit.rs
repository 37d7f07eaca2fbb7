//! Writing a kit: the key first, `fleet.json` last. A kit is whole when that is there; one that is
//! not is gone on with, with the same key, so that nothing is spent twice.

use std::path::Path;

use anyhow::{Context, bail};
use authority::{Fingerprint, Identity, JoinToken, KitFiles};
use wire::v1;

use crate::fleet::FleetFile;

/// The name of a join token, which is no secret.
const TOKEN_ID: &str = "token.id";

/// A kit to be, for a member of this name.
pub(crate) fn begin(directory: &Path, name: &str) -> anyhow::Result<Identity> {
    match FleetFile::read(directory)? {
        Some(FleetFile { identity: Some(identity), .. }) if identity.name == name => {}
        Some(FleetFile { identity: Some(identity), .. }) => bail!(
            "{} is the kit of {}; choose another directory, or remove that one (K105)",
            directory.display(),
            identity.name
        ),
        Some(_) => bail!(
            "{} is an open fleet's directory; choose another for the kit (K105)",
            directory.display()
        ),
        None => {}
    }
    Ok(Identity::named(name).within(directory))
}

/// Whom this token has let in here before, or any, where none is shown any more: a container that is
/// started anew shows it again, or does not.
pub(super) fn let_in_before(directory: &Path, line: &str) -> anyhow::Result<Option<String>> {
    let Some(FleetFile { identity: Some(identity), .. }) = FleetFile::read(directory)? else {
        return Ok(None);
    };
    if line.trim().is_empty() {
        return Ok(Some(identity.name));
    }
    let token: JoinToken = line.parse()?;
    let of_this_fleet = match identity.within(directory).read_ca() {
        Ok(ca) => Fingerprint::of_pem(&ca)? == token.ca,
        Err(_) => false,
    };
    let shown = std::fs::read_to_string(directory.join(TOKEN_ID)).unwrap_or_default();
    Ok((of_this_fleet && shown.trim() == token.id).then_some(identity.name))
}

/// Writes down, when all else is written, which token it was.
pub(super) fn note_token(directory: &Path, token: &JoinToken) -> anyhow::Result<()> {
    let path = directory.join(TOKEN_ID);
    std::fs::write(&path, &token.id).with_context(|| format!("write {}", path.display()))
}

/// Everything but the key.
pub(crate) fn finish(
    directory: &Path,
    membership: &v1::Membership,
    gateway: &str,
) -> anyhow::Result<()> {
    let identity = Identity::named(&membership.name);
    let within = identity.within(directory);
    let files =
        KitFiles { jwt: &membership.user_jwt, bearer: &membership.bearer, ca: &membership.ca_pem };
    within.write(&files).with_context(|| format!("write the kit {}", directory.display()))?;
    let file = FleetFile {
        nats: membership.nats.join(","),
        gateway: gateway.to_owned(),
        store: membership.store.clone(),
        pid: 0,
        identity: Some(identity),
    };
    file.write(directory)
}
