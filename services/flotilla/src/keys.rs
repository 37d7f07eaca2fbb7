//! A closed fleet's keys on its first machine, and kits for those who work there.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use authority::{Authority, Created, Identity, KitFiles, Member, Standing};
use bus::{
    server::Closed,
    system::{Heard, SystemError, SystemUser, push_accounts},
};
use wire::AgentId;

use crate::{fleet::FleetFile, output};

/// Below the fleet's directory.
pub(crate) const DIRECTORY: &str = "keys";
const ADMIN: &str = "admin";
const COORDINATOR: &str = "coordinator";

/// The keys of one fleet.
#[derive(Debug)]
pub(crate) struct Keys {
    fleet: PathBuf,
    authority: Authority,
}

impl Keys {
    /// Those in a fleet's directory, if it is a closed one.
    pub(crate) fn open(fleet: &Path) -> anyhow::Result<Option<Self>> {
        let directory = fleet.join(DIRECTORY);
        if !Authority::is_in(&directory) {
            return Ok(None);
        }
        let authority = Authority::open(&directory).context("open the fleet's keys")?;
        Ok(Some(Self { fleet: fleet.to_owned(), authority }))
    }

    /// Makes them, if they are not there yet, and the kits of admin and coordinator.
    pub(crate) fn make(
        fleet: &Path,
        name: &str,
        hosts: &[String],
    ) -> anyhow::Result<(Self, Created)> {
        let directory = fleet.join(DIRECTORY);
        let made = Authority::create(&directory, name, hosts, now());
        let (authority, created) = made.context("make the fleet's keys")?;
        let mut keys = Self { fleet: fleet.to_owned(), authority };
        keys.authority.serve(hosts, now())?;
        keys.refresh()?;
        Ok((keys, created))
    }

    pub(crate) fn authority(&mut self) -> &mut Authority {
        &mut self.authority
    }

    pub(crate) fn directory(&self) -> PathBuf {
        self.fleet.join(DIRECTORY)
    }

    /// What the fleet's NATS server is told, which keeps what it learns of accounts in `nats`.
    pub(crate) fn close(&self, nats: &Path) -> anyhow::Result<Closed> {
        let config = self.authority.nats_config(&nats.join("accounts"), now())?;
        Ok(Closed { config, account: self.authority.account() })
    }

    /// The same for NATS servers of the user's own: what they have as `keys`.
    pub(crate) fn write_server_keys(&self) -> anyhow::Result<()> {
        self.authority.write_server_keys(now()).context("write what NATS servers are told")
    }

    /// Has whoever uses the fleet's directory, and the coordinator, find servers of the user's own.
    pub(crate) fn write_fleet_files(&self, file: &FleetFile) -> anyhow::Result<()> {
        let identity = Some(Identity::named(COORDINATOR));
        FleetFile { identity, ..file.clone() }.write(&self.coordinator_kit())?;
        FleetFile { identity: Some(self.admin()), ..file.clone() }.write(&self.fleet)
    }

    /// Tells the fleet's NATS servers of the keys as they are now, if they are up.
    pub(crate) async fn tell(&self) -> anyhow::Result<bool> {
        let Some(file) = FleetFile::read(&self.fleet)? else { return Ok(false) };
        let (seed, jwt) = self.authority.system_user(now())?;
        let tls = authority::client_config(self.authority.ca_pem().as_bytes())?;
        let urls: Vec<String> = file.nats.split(',').map(str::to_owned).collect();
        let accounts = [self.authority.account_jwt()?];
        let user = SystemUser { seed, jwt };
        match push_accounts(&urls, tls, &user, &accounts, Heard::ByAll).await {
            Ok(()) => Ok(true),
            // They read it when they start.
            Err(SystemError::Unreachable { .. }) => Ok(false),
            Err(error) => Err(error).context("tell the fleet's NATS servers of its keys"),
        }
    }

    /// What may be shown of them.
    pub(crate) fn about(&self) -> BTreeMap<&'static str, String> {
        let authority = &self.authority;
        let ends = Duration::from_secs(authority.server_expires());
        BTreeMap::from([
            ("fleet", authority.fleet().to_owned()),
            ("hosts", authority.hosts().join(", ")),
            (
                "certificate",
                format!("of the servers, until {}", output::time(Some(&wire::timestamp(ends)))),
            ),
            ("signing keys", authority.issuers().join(", ")),
        ])
    }

    /// Of whoever uses the fleet's directory.
    pub(crate) fn admin(&self) -> Identity {
        Identity::named(ADMIN).within(&Path::new(DIRECTORY).join(ADMIN))
    }

    pub(crate) fn coordinator_kit(&self) -> PathBuf {
        self.directory().join(COORDINATOR)
    }

    /// Writes the kits of admin and coordinator, which are as good as the keys beside them and last
    /// as long.
    pub(crate) fn refresh(&self) -> anyhow::Result<()> {
        let scope = authority::Scope::Admin;
        for (name, standing) in
            [(ADMIN, Standing::User { scope }), (COORDINATOR, Standing::Coordinator)]
        {
            let member = Member { name: AgentId::new(name)?, standing };
            let at = self.directory().join(name);
            let identity = self.admit(&member, &at, None)?;
            identity.write_credentials(&at.join("nats.creds"))?;
        }
        Ok(())
    }

    fn admit(
        &self,
        member: &Member,
        at: &Path,
        expires_at: Option<u64>,
    ) -> anyhow::Result<Identity> {
        let identity = Identity::named(member.name.as_str()).within(at);
        let admission = self.authority.admit(member, &identity.public_key()?, now(), expires_at)?;
        identity.write(&KitFiles {
            jwt: &admission.jwt,
            bearer: &admission.bearer,
            ca: self.authority.ca_pem(),
        })?;
        Ok(identity)
    }
}

/// In seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
