//! Finding a fleet: by its directory on this machine, or by its bus.

mod process;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use bus::{Bus, ConnectOptions, Producer};
use clap::Args;
use control::Control;
use serde::{Deserialize, Serialize};
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
    pub pid: u32,
}

impl FleetFile {
    pub(crate) fn path(directory: &Path) -> PathBuf {
        directory.join("fleet.json")
    }

    /// The fleet of a directory; `None` when none was ever up there.
    pub(crate) fn read(directory: &Path) -> anyhow::Result<Option<Self>> {
        let path = Self::path(directory);
        let text = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("read {}", path.display()))?,
        };
        let file = serde_json::from_slice(&text);
        file.map(Some).with_context(|| format!("{} is not a fleet's file", path.display()))
    }

    pub(crate) fn write(&self, directory: &Path) -> anyhow::Result<()> {
        let path = Self::path(directory);
        let partial = path.with_extension("json.partial");
        let text = serde_json::to_vec_pretty(self)?;
        std::fs::write(&partial, text)
            .and_then(|()| std::fs::rename(&partial, &path))
            .with_context(|| format!("write {}", path.display()))
    }
}

impl FleetArgs {
    /// How to reach the bus.
    pub(crate) fn options(&self, producer: &str, role: &str) -> anyhow::Result<ConnectOptions> {
        let urls = match (&self.nats[..], &self.dir) {
            ([], Some(directory)) => {
                let found = FleetFile::read(directory)?;
                let file = found.with_context(|| {
                    let directory = directory.display();
                    format!("no fleet was ever up in {directory}; `flotilla up --dir {directory}` starts one")
                })?;
                vec![file.nats]
            }
            ([], None) => bail!(
                "which fleet? pass --dir DIR or --nats URL, or set FLOTILLA_DIR or FLOTILLA_NATS"
            ),
            (urls, _) => urls.to_vec(),
        };
        Ok(ConnectOptions {
            urls,
            credentials_file: self.nats_creds.clone(),
            tls_ca: self.nats_ca.clone(),
            tls_cert: self.nats_cert.clone(),
            tls_key: self.nats_key.clone(),
            monitor_urls: Vec::new(),
            producer: Producer { name: producer.to_owned(), role: role.to_owned() },
        })
    }

    pub(crate) async fn bus(&self, producer: &str, role: &str) -> anyhow::Result<Bus> {
        Ok(Bus::connect(&self.options(producer, role)?).await?)
    }

    /// A fleet to ask and to steer.
    pub(crate) async fn control(&self) -> anyhow::Result<Control> {
        let bus = self.bus("cli", "user").await?;
        let config = config(&bus).await?;
        Ok(Control::new(bus, config.store))
    }
}

/// What a fleet says of itself to those who join.
pub(crate) async fn config(bus: &Bus) -> anyhow::Result<v1::FleetConfig> {
    let config = bus.fleet_config().await?;
    config.context("there is no fleet on this NATS server; `flotilla up` starts one")
}
