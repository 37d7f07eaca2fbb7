//! Connection to a fleet: by its directory on this machine, or by its NATS server.

mod process;

use std::{
    fs, io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use bounded_http::CompletionClient;
use bus::{Bus, ConnectOptions, FactProducer};
use clap::Args;
use control::{FleetControl, StoreAccess};
use gateway::client::ClientError;
use identity::MemberIdentity;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};
use store::GatewayStore;
use wire::v1;

use crate::output;

pub use self::process::{FleetProcess, FleetProcessOptions, wait_ready};

/// Flags that select a fleet.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct FleetArgs {
    /// Directory of the fleet on this machine
    #[arg(long, value_name = "DIR", env = "FLOTILLA_DIR", global = true, help_heading = CONNECTION_HEADING)]
    pub dir: Option<PathBuf>,
    /// URL of the fleet's NATS server; separate several of a cluster by commas
    #[arg(long, value_name = "URL", env = "FLOTILLA_NATS", value_delimiter = ',', global = true, help_heading = CONNECTION_HEADING)]
    pub nats: Vec<String>,
    /// Credentials file for the NATS server
    #[arg(long, value_name = "FILE", env = "FLOTILLA_NATS_CREDS", global = true, help_heading = CONNECTION_HEADING)]
    pub nats_creds: Option<PathBuf>,
    /// Certificate authority of the NATS server
    #[arg(long, value_name = "FILE", env = "FLOTILLA_NATS_CA", global = true, help_heading = CONNECTION_HEADING)]
    pub nats_ca: Option<PathBuf>,
    /// Client certificate for the NATS server
    #[arg(long, value_name = "FILE", env = "FLOTILLA_NATS_CERT", requires = "nats_key", global = true, help_heading = CONNECTION_HEADING)]
    pub nats_cert: Option<PathBuf>,
    /// Private key of the client certificate
    #[arg(long, value_name = "FILE", env = "FLOTILLA_NATS_KEY", requires = "nats_cert", global = true, help_heading = CONNECTION_HEADING)]
    pub nats_key: Option<PathBuf>,
}

/// The directory of a closed fleet's keys, in the fleet's directory.
pub(crate) const KEYS_DIRECTORY: &str = "keys";

/// The key of a member in its credentials directory.
const KEY_FILE: &str = "key.nk";

/// The section of the help with the options that select a fleet.
pub(crate) const CONNECTION_HEADING: &str = "Connection options";

/// The file `fleet.json` in a fleet's directory: the addresses of its services.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FleetFile {
    pub nats: String,
    pub gateway: String,
    pub store: String,
    /// Process id of `flotilla up`; 0 if this machine does not run the services.
    #[serde(default)]
    pub pid: u32,
    /// Agents that `flotilla up` started here last, in the format of `--agents`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub agents: Vec<String>,
    /// Member that uses this directory, in a closed fleet; its paths are relative to the directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<MemberIdentity>,
}

impl FleetFile {
    /// Returns the URL of the page, which needs no certificate on the gateway's machine.
    pub(crate) fn page_url(&self) -> String {
        let (host, port) = match self.gateway.parse::<SocketAddr>() {
            Ok(SocketAddr::V4(at))
                if [Ipv4Addr::LOCALHOST, Ipv4Addr::UNSPECIFIED].contains(at.ip()) =>
            {
                ("127.0.0.1", at.port())
            }
            Ok(SocketAddr::V6(at))
                if [Ipv6Addr::LOCALHOST, Ipv6Addr::UNSPECIFIED].contains(at.ip()) =>
            {
                ("[::1]", at.port())
            }
            _ => return self.api_url(),
        };
        // Not localhost: its other address may be somebody else's.
        format!("http://{host}:{port}/")
    }

    pub(crate) fn api_url(&self) -> String {
        let scheme = if self.identity.is_some() { "https" } else { "http" };
        match self.gateway.parse::<SocketAddr>() {
            Ok(all) if all.ip().is_unspecified() => format!("{scheme}://localhost:{}/", all.port()),
            _ => format!("{scheme}://{}/", self.gateway),
        }
    }

    /// Returns the page's URL, and how to sign in to a closed fleet's.
    pub(crate) fn describe_page(&self, directory: &Path) -> String {
        let page = self.page_url();
        let directory = output::escape_line(&directory.display().to_string());
        let accept = if page.starts_with("https") { "accept its certificate; " } else { "" };
        let open = format!("{accept}flotilla open --dir {directory} makes a link that signs in");
        if self.identity.is_none() { page } else { format!("{page} ({open})") }
    }

    /// Returns the process of `flotilla up`, if it runs on this machine.
    pub(crate) fn find_process(&self) -> Option<Pid> {
        Pid::from_raw(i32::try_from(self.pid).ok()?).filter(|pid| is_fleet_process(*pid))
    }

    /// Returns true if this machine ran the services and does not now. A process of another user
    /// may be the fleet's.
    fn is_down(&self) -> bool {
        let process = PathBuf::from(format!("/proc/{}", self.pid));
        // One that ended but was not waited for has no command line.
        let of_another = fs::read_link(process.join("exe")).is_err() && runs_up(&process);
        self.pid != 0 && self.find_process().is_none() && !of_another
    }

    /// Returns true if the directory has the credentials of a member, and not the fleet itself.
    fn is_elsewhere(&self, directory: &Path) -> bool {
        self.pid == 0 && self.identity.is_some() && !directory.join(KEYS_DIRECTORY).is_dir()
    }

    /// Fails, with a remedy, if the directory has the credentials of a member.
    pub(crate) fn require_own(&self, directory: &Path, remedy: &str) -> anyhow::Result<()> {
        ensure!(
            !self.is_elsewhere(directory),
            "{} has the credentials of a member, and its fleet runs elsewhere; {remedy} (A103)",
            directory.display()
        );
        Ok(())
    }

    pub(crate) fn path_in(directory: &Path) -> PathBuf {
        directory.join("fleet.json")
    }

    /// `None` if no fleet was ever up there.
    pub(crate) fn read(directory: &Path) -> anyhow::Result<Option<Self>> {
        let path = Self::path_in(directory);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("read {}", path.display()))?,
        };
        let file = serde_json::from_slice(&text);
        if file.is_err() {
            refuse_inner_directory(directory)?;
        }
        file.with_context(|| format!("{} is not a valid fleet file (A103)", path.display()))
    }

    /// Returns the file and the member that uses the directory; `None` if the fleet is open.
    pub(crate) fn read_member(directory: &Path) -> anyhow::Result<Option<(Self, MemberIdentity)>> {
        let member = |file: Self| {
            let identity = file.identity.as_ref()?.resolve_in(directory);
            Some((file, identity))
        };
        Ok(Self::read(directory)?.and_then(member))
    }

    /// Returns a client of the gateway's OpenAI API with the rights of the directory's member.
    pub(crate) fn connect_completions(directory: &Path) -> anyhow::Result<CompletionClient> {
        let file = Self::read(directory)?.context("the fleet has no fleet.json (A106)")?;
        let url = format!("{}v1", file.api_url());
        let Some(MemberIdentity { bearer, ca, .. }) =
            file.identity.as_ref().map(|it| it.resolve_in(directory))
        else {
            return Ok(CompletionClient::for_url(&url, None)?);
        };
        let at = |path: &Path| format!("read {}", path.display());
        let key = bounded_http::read_key_file(&bearer).with_context(|| at(&bearer))?;
        let authority = fs::read(&ca).with_context(|| at(&ca))?;
        Ok(CompletionClient::for_authority(&url, key, &authority)?)
    }

    pub(crate) fn write(&self, directory: &Path) -> anyhow::Result<()> {
        let path = Self::path_in(directory);
        // Follows no links, because root writes into directories of other users.
        durable_files::replace_file(&path, &serde_json::to_vec_pretty(self)?, 0o666)
            .with_context(|| format!("write {}", path.display()))
    }
}

impl FleetArgs {
    pub(crate) fn connect_options(
        &self,
        producer: &str,
        role: &str,
    ) -> anyhow::Result<ConnectOptions> {
        let file = self.dir.as_deref().map(FleetFile::read).transpose()?.flatten();
        let urls = match (&self.nats[..], &file, &self.dir) {
            ([], Some(file), _) => file.nats.split(',').map(str::to_owned).collect(),
            ([], None, Some(directory)) if !directory.is_dir() => {
                bail!(
                    "there is no directory {}; pass that of a fleet, or of a member's credentials \
                     (A103)",
                    directory.display()
                )
            }
            ([], None, Some(directory)) => {
                refuse_inner_directory(directory)?;
                let has_key = directory.join(KEY_FILE).exists();
                let directory = directory.display();
                if has_key {
                    bail!(
                        "{directory} has the key of a member that was not admitted; run its \
                         `flotilla join` or `flotilla user create` again (A103)"
                    );
                }
                bail!(
                    "no fleet has run in {directory}; start one with `flotilla up --dir {directory}` (A103)"
                )
            }
            ([], None, None) => bail!(
                "no fleet given; pass --dir DIR or --nats URL, or set FLOTILLA_DIR or FLOTILLA_NATS (A103)"
            ),
            (urls, ..) => urls.to_vec(),
        };
        Ok(ConnectOptions {
            urls,
            identity: self.read_member()?.map(|(_, identity)| identity),
            credentials_file: self.nats_creds.clone(),
            tls_ca: self.nats_ca.clone(),
            tls_cert: self.nats_cert.clone(),
            tls_key: self.nats_key.clone(),
            monitor_urls: Vec::new(),
            producer: FactProducer { name: producer.to_owned(), role: role.to_owned() },
        })
    }

    /// Returns the arguments that select the fleet of a directory.
    pub(crate) fn in_directory(directory: &Path) -> Self {
        Self { dir: Some(directory.to_owned()), ..Self::default() }
    }

    pub(crate) fn require_directory(&self) -> anyhow::Result<&Path> {
        self.dir.as_deref().context("pass --dir DIR, the fleet's directory (A103)")
    }

    /// `None` if the fleet is open.
    pub(crate) fn read_member(&self) -> anyhow::Result<Option<(FleetFile, MemberIdentity)>> {
        Ok(self.dir.as_deref().map(FleetFile::read_member).transpose()?.flatten())
    }

    pub(crate) async fn connect_bus(&self, producer: &str, role: &str) -> anyhow::Result<Bus> {
        let connected = Bus::connect(&self.connect_options(producer, role)?).await;
        connected.map_err(|error| self.explain_failure(error.into()))
    }

    /// Names the command that starts the fleet, if the fleet of the directory is down.
    pub(crate) fn explain_failure(&self, error: anyhow::Error) -> anyhow::Error {
        let file = self.dir.as_deref().and_then(|directory| FleetFile::read(directory).ok()?);
        match (&self.dir, file) {
            (Some(directory), Some(file)) if self.nats.is_empty() && file.is_down() => {
                let directory = directory.display();
                error.context(format!(
                    "the fleet in {directory} is down; `flotilla up --dir {directory}` starts it \
                     with the agents that it had; pass its other options again (A106)"
                ))
            }
            (Some(directory), Some(file))
                if self.nats.is_empty()
                    && file.is_elsewhere(directory)
                    && is_unreachable(&error) =>
            {
                let (directory, FleetFile { nats, gateway, .. }) = (directory.display(), &file);
                error.context(format!(
                    "the fleet that the credentials in {directory} belong to is not reachable at \
                     {nats} (gateway {gateway}); start it on its box with `flotilla up`, and check \
                     the network (B102)"
                ))
            }
            _ => error,
        }
    }

    pub(crate) async fn connect_control(&self) -> anyhow::Result<FleetControl> {
        let bus = self.connect_bus("cli", "user").await?;
        let config = read_fleet_config(&bus).await?;
        Ok(FleetControl::new(bus, self.store_access(&config, None)?))
    }

    /// `named` or `FLOTILLA_STORE` overrides the fleet's URL.
    pub(crate) fn store_access(
        &self,
        config: &v1::FleetConfig,
        named: Option<&str>,
    ) -> anyhow::Result<StoreAccess> {
        let named = named.map(str::to_owned).or_else(|| std::env::var("FLOTILLA_STORE").ok());
        let named = named.filter(|url| !url.is_empty());
        let gateway = self.read_member()?.map(|(file, MemberIdentity { ca, bearer, .. })| {
            GatewayStore { gateway: file.gateway, ca: Some(ca), bearer: Some(bearer) }
        });
        Ok(StoreAccess { url: config.store.clone(), override_url: named, gateway })
    }
}

/// Returns true if nothing answered, unlike a server that refused.
fn is_unreachable(error: &anyhow::Error) -> bool {
    use bus::ConnectError::{TimedOut, Unreachable};
    let is_silent_bus = matches!(error.downcast_ref(), Some(TimedOut { .. } | Unreachable { .. }));
    let is_silent_gateway = matches!(error.downcast_ref(), Some(ClientError::Unreachable { .. }));
    is_silent_bus || is_silent_gateway
}

/// Fails if the directory, such as `keys/admin`, is inside a fleet's.
fn refuse_inner_directory(directory: &Path) -> anyhow::Result<()> {
    let is_fleet = |above: &&Path| FleetFile::read(above).is_ok_and(|file| file.is_some());
    let whole = directory.canonicalize().unwrap_or_default();
    let Some(fleet) = whole.ancestors().skip(1).take(2).find(is_fleet) else { return Ok(()) };
    let (inner, fleet) = (directory.display(), fleet.display());
    bail!("{inner} is a directory inside a fleet's; pass --dir {fleet} (A103)")
}

/// Returns true if the process is a `flotilla up`: the id may belong to another process by now.
pub(crate) fn is_fleet_process(pid: Pid) -> bool {
    let process = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
    let named = |path: PathBuf| path.file_name().map(std::ffi::OsStr::to_owned);
    let program = fs::read_link(process.join("exe")).ok().and_then(named);
    let ours = std::env::current_exe().ok().and_then(named);
    // Linux shows a program that was replaced while it runs as "flotilla (deleted)".
    let same = program.zip(ours).is_some_and(|(program, ours)| {
        program.to_string_lossy().starts_with(&*ours.to_string_lossy())
    });
    same && runs_up(&process) && test_kill_process(pid).is_ok()
}

/// Returns true if the command of a process, a directory of `/proc`, has the argument `up`.
fn runs_up(process: &Path) -> bool {
    let command = fs::read(process.join("cmdline")).unwrap_or_default();
    command.split(|byte| *byte == 0).any(|argument| argument == b"up")
}

pub(crate) async fn read_fleet_config(bus: &Bus) -> anyhow::Result<v1::FleetConfig> {
    let config = bus.read_fleet_config().await?;
    config.context("no fleet on this NATS server; start one with `flotilla up` (A103)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_inside_a_fleets_leads_to_it() {
        let directory = tempfile::tempdir().unwrap();
        let inside = directory.path().join("keys/admin");
        fs::create_dir_all(&inside).unwrap();
        refuse_inner_directory(&inside).unwrap();
        let (nats, gateway, store) = ("nats://a:1".into(), "a:2".into(), "file:///c".into());
        let file = FleetFile { nats, gateway, store, pid: 0, agents: Vec::new(), identity: None };
        file.write(directory.path()).unwrap();
        let whole = directory.path().canonicalize().unwrap();
        let remedy =
            format!("is a directory inside a fleet's; pass --dir {} (A103)", whole.display());
        let refused = refuse_inner_directory(&inside).unwrap_err().to_string();
        assert!(refused.ends_with(&remedy), "{refused}");
        let keys = directory.path().join("keys");
        fs::write(FleetFile::path_in(&keys), r#"{"name": "flotilla"}"#).unwrap();
        let refused = FleetFile::read(&keys).unwrap_err().to_string();
        assert!(refused.ends_with(&remedy), "{refused}");
    }

    #[test]
    fn a_member_learns_that_its_fleet_is_not_reachable() {
        let directory = tempfile::tempdir().unwrap();
        let identity = Some(MemberIdentity::with_default_files("ann"));
        let (nats, gateway, store) = ("tls://a:1".into(), "a:2".into(), "file:///c".into());
        let file = FleetFile { nats, gateway, store, pid: 0, agents: Vec::new(), identity };
        file.write(directory.path()).unwrap();
        let fleet = FleetArgs::in_directory(directory.path());
        let explain = |error: anyhow::Error| fleet.explain_failure(error).to_string();
        let limit = std::time::Duration::from_secs(5);
        let silent = bus::ConnectError::TimedOut { urls: "tls://a:1".into(), limit };
        let told = explain(silent.into());
        assert!(told.contains("not reachable at tls://a:1 (gateway a:2)"), "{told}");
        let refused = bus::ConnectError::Refused { urls: "tls://a:1".into() };
        let told = explain(refused.into());
        assert!(told.contains("refused these credentials"), "{told}");
    }

    #[test]
    fn a_link_where_a_fleets_file_is_written_is_replaced_and_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let shadow = directory.path().join("shadow");
        fs::write(&shadow, "root's").unwrap();
        for name in ["fleet.json.partial", "fleet.json"] {
            std::os::unix::fs::symlink(&shadow, directory.path().join(name)).unwrap();
        }
        let (nats, gateway, store) = ("nats://a:1".into(), "a:2".into(), "file:///c".into());
        let file = FleetFile { nats, gateway, store, pid: 0, agents: Vec::new(), identity: None };
        file.write(directory.path()).unwrap();
        assert_eq!(fs::read_to_string(&shadow).unwrap(), "root's");
        assert_eq!(FleetFile::read(directory.path()).unwrap().unwrap().gateway, "a:2");
        assert!(FleetFile::path_in(directory.path()).symlink_metadata().unwrap().is_file());
    }
}
