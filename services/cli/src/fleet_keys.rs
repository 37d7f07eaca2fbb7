//! The keys of a closed fleet on its first machine, and the credentials of its own members there.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context;
use bus::{
    server::ClosedFleetConfig,
    system_account::{PushAccountsError, PushScope, SystemAccountUser, push_accounts},
};
use identity::{
    CreateOutcome, CredentialFiles, FleetAuthority, Member, MemberIdentity, MemberKind,
};
use wire::AgentId;

use crate::{clock::unix_time_s, fleet::FleetFile, output};

/// Name of the key directory below the fleet's directory.
pub(crate) const KEYS_DIRECTORY: &str = "keys";
/// Name of the admin member and of its credentials directory.
const ADMIN_NAME: &str = "admin";
/// Name of the coordinator member and of its credentials directory.
const COORDINATOR_NAME: &str = "coordinator";

/// The keys of one closed fleet, in `keys/` below its directory.
#[derive(Debug)]
pub(crate) struct FleetKeys {
    fleet: PathBuf,
    authority: FleetAuthority,
}

impl FleetKeys {
    /// Opens the keys in a fleet's directory; `None` if the fleet is open.
    pub(crate) fn open(fleet: &Path) -> anyhow::Result<Option<Self>> {
        let directory = fleet.join(KEYS_DIRECTORY);
        if !FleetAuthority::exists_in(&directory) {
            return Ok(None);
        }
        let authority = FleetAuthority::open(&directory).context("open the fleet's keys")?;
        Ok(Some(Self { fleet: fleet.to_owned(), authority }))
    }

    /// Creates the keys if they are missing, the server certificate for `hosts`, and the
    /// credentials of the admin and the coordinator.
    pub(crate) fn create_or_open(
        fleet: &Path,
        name: &str,
        hosts: &[String],
    ) -> anyhow::Result<(Self, CreateOutcome)> {
        let directory = fleet.join(KEYS_DIRECTORY);
        let made = FleetAuthority::create_or_open(&directory, name, hosts, unix_time_s());
        let (authority, created) = made.context("make the fleet's keys")?;
        let mut keys = Self { fleet: fleet.to_owned(), authority };
        keys.authority.ensure_server_certificate(hosts, unix_time_s())?;
        keys.write_own_credentials()?;
        Ok((keys, created))
    }

    /// Returns the fleet's authority, to change keys.
    pub(crate) fn authority_mut(&mut self) -> &mut FleetAuthority {
        &mut self.authority
    }

    /// Returns the path of the key directory.
    pub(crate) fn keys_directory(&self) -> PathBuf {
        self.fleet.join(KEYS_DIRECTORY)
    }

    /// Returns the configuration of the fleet's managed NATS server, which keeps the accounts it
    /// receives in `nats/accounts`.
    pub(crate) fn nats_server_config(&self, nats: &Path) -> anyhow::Result<ClosedFleetConfig> {
        let config = self.authority.nats_config(&nats.join("accounts"), unix_time_s())?;
        Ok(ClosedFleetConfig { config, account: self.authority.account_public_key() })
    }

    /// Writes the key files for NATS servers that the user runs, which use them as `keys`.
    pub(crate) fn write_server_keys(&self) -> anyhow::Result<()> {
        self.authority
            .write_server_keys(unix_time_s())
            .context("write the NATS server configuration")
    }

    /// Writes `fleet.json` for the admin and for the coordinator, so that both find NATS servers
    /// that the user runs.
    pub(crate) fn write_fleet_files(&self, file: &FleetFile) -> anyhow::Result<()> {
        let identity = Some(MemberIdentity::with_default_files(COORDINATOR_NAME));
        FleetFile { identity, ..file.clone() }.write(&self.coordinator_directory())?;
        FleetFile { identity: Some(self.admin_identity()), ..file.clone() }.write(&self.fleet)
    }

    /// Pushes the fleet's account to its NATS servers. Returns false if none of them is up; they
    /// read it when they start.
    pub(crate) async fn push_to_servers(&self) -> anyhow::Result<bool> {
        let Some(file) = FleetFile::read(&self.fleet)? else { return Ok(false) };
        let (seed, jwt) = self.authority.create_system_user(unix_time_s())?;
        let tls = identity::fleet_client_config(self.authority.ca_pem().as_bytes())?;
        let urls: Vec<String> = file.nats.split(',').map(str::to_owned).collect();
        let accounts = [self.authority.fleet_account_jwt()?];
        let user = SystemAccountUser { seed, jwt };
        match push_accounts(&urls, tls, &user, &accounts, PushScope::AllServers).await {
            Ok(()) => Ok(true),
            // The servers read the account when they start.
            Err(PushAccountsError::Unreachable { .. }) => Ok(false),
            Err(error) => Err(error).context("push the keys to the fleet's NATS servers"),
        }
    }

    /// Returns the public facts about the keys: name, hosts, certificate expiry and signing keys.
    pub(crate) fn public_summary(&self) -> BTreeMap<&'static str, String> {
        let authority = &self.authority;
        let ends = Duration::from_secs(authority.server_expires_at());
        BTreeMap::from([
            ("fleet", authority.fleet_name().to_owned()),
            ("hosts", authority.server_hosts().join(", ")),
            (
                "certificate",
                format!(
                    "of the servers, until {}",
                    output::format_time(Some(&wire::to_timestamp(ends)))
                ),
            ),
            ("signing keys", authority.issuer_keys().join(", ")),
        ])
    }

    /// Returns the identity of the admin, whose credentials the fleet's directory uses.
    pub(crate) fn admin_identity(&self) -> MemberIdentity {
        MemberIdentity::with_default_files(ADMIN_NAME)
            .resolve_in(&Path::new(KEYS_DIRECTORY).join(ADMIN_NAME))
    }

    /// Returns the credentials directory of the coordinator.
    pub(crate) fn coordinator_directory(&self) -> PathBuf {
        self.keys_directory().join(COORDINATOR_NAME)
    }

    /// Writes the credentials of the admin and the coordinator. They do not expire, because they
    /// lie beside the keys and are worth as much.
    pub(crate) fn write_own_credentials(&self) -> anyhow::Result<()> {
        let scope = identity::UserScope::Admin;
        for (name, standing) in
            [(ADMIN_NAME, MemberKind::User { scope }), (COORDINATOR_NAME, MemberKind::Coordinator)]
        {
            let member = Member { name: AgentId::new(name)?, standing };
            let at = self.keys_directory().join(name);
            let identity = self.issue_credentials(&member, &at, None)?;
            identity.write_creds_file(&at.join("nats.creds"))?;
        }
        Ok(())
    }

    /// Issues tokens to a member and writes its credentials to the directory `at`.
    fn issue_credentials(
        &self,
        member: &Member,
        at: &Path,
        expires_at: Option<u64>,
    ) -> anyhow::Result<MemberIdentity> {
        let identity = MemberIdentity::with_default_files(member.name.as_str()).resolve_in(at);
        let admission = self.authority.issue_tokens(
            member,
            &identity.ensure_public_key()?,
            unix_time_s(),
            expires_at,
        )?;
        identity.write_files(&CredentialFiles {
            jwt: &admission.jwt,
            bearer: &admission.bearer,
            ca: self.authority.ca_pem(),
        })?;
        Ok(identity)
    }
}
