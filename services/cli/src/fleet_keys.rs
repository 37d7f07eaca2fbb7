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
use wire::{AgentId, clock::unix_seconds};

use crate::{
    fleet::{FleetFile, KEYS_DIRECTORY},
    output,
};

const ADMIN_NAME: &str = "admin";
const COORDINATOR_NAME: &str = "coordinator";

#[derive(Debug)]
pub(crate) struct FleetKeys {
    fleet: PathBuf,
    authority: FleetAuthority,
}

impl FleetKeys {
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
        let made = FleetAuthority::create_or_open(&directory, name, hosts, unix_seconds());
        let (authority, created) = made.context("make the fleet's keys")?;
        let mut keys = Self { fleet: fleet.to_owned(), authority };
        keys.authority.ensure_server_certificate(hosts, unix_seconds())?;
        keys.write_own_credentials()?;
        Ok((keys, created))
    }

    pub(crate) fn authority_mut(&mut self) -> &mut FleetAuthority {
        &mut self.authority
    }

    pub(crate) fn keys_directory(&self) -> PathBuf {
        self.fleet.join(KEYS_DIRECTORY)
    }

    /// Returns the configuration of the fleet's managed NATS server, which keeps the accounts it
    /// receives in `nats/accounts`.
    pub(crate) fn nats_server_config(&self, nats: &Path) -> anyhow::Result<ClosedFleetConfig> {
        let config = self.authority.nats_config(&nats.join("accounts"), unix_seconds())?;
        Ok(ClosedFleetConfig { config, account: self.authority.account_public_key() })
    }

    pub(crate) fn write_server_keys(&self) -> anyhow::Result<()> {
        self.authority
            .write_server_keys(unix_seconds())
            .context("write the NATS server configuration")
    }

    /// Both find NATS servers that the user runs by it.
    pub(crate) fn write_fleet_files(&self, file: &FleetFile) -> anyhow::Result<()> {
        let identity = Some(MemberIdentity::with_default_files(COORDINATOR_NAME));
        FleetFile { identity, ..file.clone() }.write(&self.coordinator_directory())?;
        FleetFile { identity: Some(self.admin_identity()), ..file.clone() }.write(&self.fleet)
    }

    /// Returns false if none of them is up; they read the account when they start.
    pub(crate) async fn push_to_servers(&self) -> anyhow::Result<bool> {
        let Some(file) = FleetFile::read(&self.fleet)? else { return Ok(false) };
        let (seed, jwt) = self.authority.create_system_user(unix_seconds())?;
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

    pub(crate) fn public_summary(&self) -> BTreeMap<&'static str, String> {
        let authority = &self.authority;
        let ends = wire::to_timestamp(Duration::from_secs(authority.server_expires_at()));
        let until = output::format_time(Some(&ends));
        BTreeMap::from([
            ("fleet", authority.fleet_name().to_owned()),
            ("hosts", authority.server_hosts().join(", ")),
            ("certificate", format!("of the servers, until {until}")),
            ("signing keys", authority.issuer_keys().join(", ")),
        ])
    }

    pub(crate) fn admin_identity(&self) -> MemberIdentity {
        MemberIdentity::with_default_files(ADMIN_NAME)
            .resolve_in(&Path::new(KEYS_DIRECTORY).join(ADMIN_NAME))
    }

    pub(crate) fn coordinator_directory(&self) -> PathBuf {
        self.keys_directory().join(COORDINATOR_NAME)
    }

    /// They do not expire, because they lie beside the keys and are worth as much.
    pub(crate) fn write_own_credentials(&self) -> anyhow::Result<()> {
        let scope = identity::UserScope::Admin;
        for (name, standing) in
            [(ADMIN_NAME, MemberKind::User { scope }), (COORDINATOR_NAME, MemberKind::Coordinator)]
        {
            let member = Member { name: AgentId::new(name)?, standing };
            let at = self.keys_directory().join(name);
            let identity = MemberIdentity::with_default_files(name).resolve_in(&at);
            let key = identity.ensure_public_key()?;
            let tokens = self.authority.issue_tokens(&member, &key, unix_seconds(), None)?;
            identity.write_files(&CredentialFiles {
                jwt: &tokens.jwt,
                bearer: &tokens.bearer,
                ca: self.authority.ca_pem(),
            })?;
            identity.write_creds_file(&at.join("nats.creds"))?;
        }
        Ok(())
    }
}
