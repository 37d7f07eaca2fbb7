//! Writing a kit: the key first, `fleet.json` last. A kit is whole when that is there; one that is
//! not is gone on with, with the same key, so that nothing is spent twice.

use std::path::Path;

use anyhow::{Context, bail};
use authority::{Identity, KitFiles};
use wire::v1;

use crate::fleet::FleetFile;

/// A kit to be, for a member of this name.
pub(crate) fn begin(directory: &Path, name: &str) -> anyhow::Result<Identity> {
    match FleetFile::read(directory)? {
        Some(FleetFile { identity: Some(identity), .. }) if identity.name == name => {}
        Some(FleetFile { identity: Some(identity), .. }) => bail!(
            "{} is the kit of {}; choose another directory, or remove that one",
            directory.display(),
            identity.name
        ),
        Some(_) => bail!(
            "{} is an open fleet's directory; choose another for the kit",
            directory.display()
        ),
        None => {}
    }
    Ok(Identity::named(name).within(directory))
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
