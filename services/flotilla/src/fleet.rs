//! Finding a fleet: by its directory on this machine, or by its bus.

mod process;

use std::{
    fs::{self, File},
    io::{self, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use authority::Identity;
use bus::{Bus, ConnectOptions, Producer};
use clap::Args;
use control::{Control, Stores};
use serde::{Deserialize, Serialize};
use store::Door;
use wire::v1;

pub(crate) use self::process::{FleetProcess, Wanted, ready};

/// Which fleet a command is about.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct FleetArgs {
    /// A fleet's directory on this machine.
    #[arg(long, env = "FLOTILLA_DIR", global = true)]
    pub dir: Option<PathBuf>,
    /// A fleet's NATS server; several, separated by commas, for a cluster.
    #[arg(long, env = "FLOTILLA_NATS", value_delimiter = ',', global = true)]
    pub nats: Vec<String>,
    /// Credentials file for the NATS server.
    #[arg(long, env = "FLOTILLA_NATS_CREDS", global = true)]
    pub nats_creds: Option<PathBuf>,
    /// Certificate authority of the NATS server.
    #[arg(long, env = "FLOTILLA_NATS_CA", global = true)]
    pub nats_ca: Option<PathBuf>,
    /// Client certificate for the NATS server.
    #[arg(long, env = "FLOTILLA_NATS_CERT", requires = "nats_key", global = true)]
    pub nats_cert: Option<PathBuf>,
    /// Key of the client certificate.
    #[arg(long, env = "FLOTILLA_NATS_KEY", requires = "nats_cert", global = true)]
    pub nats_key: Option<PathBuf>,
}

/// `fleet.json` in a fleet's directory: where its parts are while it is up.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FleetFile {
    pub nats: String,
    pub gateway: String,
    pub store: String,
    /// Of `flotilla up`.
    #[serde(default)]
    pub pid: u32,
    /// Who uses this directory, in a closed fleet; paths are relative to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
}

impl FleetFile {
    /// The gateway's web page, for a browser on this machine.
    pub(crate) fn page(&self) -> String {
        let scheme = if self.identity.is_some() { "https" } else { "http" };
        match self.gateway.parse::<SocketAddr>() {
            Ok(all) if all.ip().is_unspecified() => format!("{scheme}://localhost:{}/", all.port()),
            _ => format!("{scheme}://{}/", self.gateway),
        }
    }

    pub(crate) fn path(directory: &Path) -> PathBuf {
        directory.join("fleet.json")
    }

    /// The fleet of a directory; `None` when none was ever up there.
    pub(crate) fn read(directory: &Path) -> anyhow::Result<Option<Self>> {
        let path = Self::path(directory);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("read {}", path.display()))?,
        };
        let file = serde_json::from_slice(&text);
        file.map(Some).with_context(|| format!("{} is not a fleet's file", path.display()))
    }

    pub(crate) fn write(&self, directory: &Path) -> anyhow::Result<()> {
        let path = Self::path(directory);
        let partial = path.with_extension("json.partial");
        let text = serde_json::to_vec_pretty(self)?;
        write_new(&partial, &text)
            .and_then(|()| fs::rename(&partial, &path))
            .with_context(|| format!("write {}", path.display()))
    }
}

/// Through no link: root writes into directories of others.
fn write_new(path: &Path, text: &[u8]) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => File::create_new(path)?.write_all(text),
    }
}

impl FleetArgs {
    /// How to reach the bus.
    pub(crate) fn options(&self, producer: &str, role: &str) -> anyhow::Result<ConnectOptions> {
        let file = self.dir.as_deref().map(FleetFile::read).transpose()?.flatten();
        let urls = match (&self.nats[..], &file, &self.dir) {
            ([], Some(file), _) => file.nats.split(',').map(str::to_owned).collect(),
            ([], None, Some(directory)) => {
                let directory = directory.display();
                bail!(
                    "no fleet was ever up in {directory}; `flotilla up --dir {directory}` starts one (A103)"
                )
            }
            ([], None, None) => bail!(
                "which fleet? pass --dir DIR or --nats URL, or set FLOTILLA_DIR or FLOTILLA_NATS (A103)"
            ),
            (urls, ..) => urls.to_vec(),
        };
        Ok(ConnectOptions {
            urls,
            identity: self.identity()?,
            credentials_file: self.nats_creds.clone(),
            tls_ca: self.nats_ca.clone(),
            tls_cert: self.nats_cert.clone(),
            tls_key: self.nats_key.clone(),
            monitor_urls: Vec::new(),
            producer: Producer { name: producer.to_owned(), role: role.to_owned() },
        })
    }

    /// Who we are, if the fleet is a closed one.
    pub(crate) fn identity(&self) -> anyhow::Result<Option<Identity>> {
        let Some(directory) = &self.dir else { return Ok(None) };
        let file = FleetFile::read(directory)?;
        Ok(file.and_then(|file| file.identity).map(|identity| identity.within(directory)))
    }

    pub(crate) async fn bus(&self, producer: &str, role: &str) -> anyhow::Result<Bus> {
        Ok(Bus::connect(&self.options(producer, role)?).await?)
    }

    /// A fleet to ask and to steer.
    pub(crate) async fn control(&self) -> anyhow::Result<Control> {
        let bus = self.bus("cli", "user").await?;
        let config = config(&bus).await?;
        Ok(Control::new(bus, self.stores(&config, None)?))
    }

    /// The ways to the fleet's store from here.
    pub(crate) fn stores(
        &self,
        config: &v1::FleetConfig,
        named: Option<&str>,
    ) -> anyhow::Result<Stores> {
        let named = named.map(str::to_owned).or_else(|| std::env::var("FLOTILLA_STORE").ok());
        let named = named.filter(|url| !url.is_empty());
        Ok(Stores { url: config.store.clone(), named, door: self.door()? })
    }

    /// This member's way to the store through the gateway.
    fn door(&self) -> anyhow::Result<Option<Door>> {
        let Some(directory) = &self.dir else { return Ok(None) };
        let Some(FleetFile { gateway, identity: Some(identity), .. }) = FleetFile::read(directory)?
        else {
            return Ok(None);
        };
        let Identity { ca, bearer, .. } = identity.within(directory);
        Ok(Some(Door { gateway, ca: Some(ca), bearer: Some(bearer) }))
    }
}

/// What a fleet says of itself to those who join.
pub(crate) async fn config(bus: &Bus) -> anyhow::Result<v1::FleetConfig> {
    let config = bus.fleet_config().await?;
    config.context("there is no fleet on this NATS server; `flotilla up` starts one (A103)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_where_a_fleets_file_is_written_is_replaced_and_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let shadow = directory.path().join("shadow");
        fs::write(&shadow, "root's").unwrap();
        for name in ["fleet.json.partial", "fleet.json"] {
            std::os::unix::fs::symlink(&shadow, directory.path().join(name)).unwrap();
        }
        let (nats, gateway, store) = ("nats://a:1".into(), "a:2".into(), "file:///c".into());
        let file = FleetFile { nats, gateway, store, pid: 0, identity: None };
        file.write(directory.path()).unwrap();
        assert_eq!(fs::read_to_string(&shadow).unwrap(), "root's");
        assert_eq!(FleetFile::read(directory.path()).unwrap().unwrap().gateway, "a:2");
        assert!(FleetFile::path(directory.path()).symlink_metadata().unwrap().is_file());
    }
}
