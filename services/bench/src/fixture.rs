//! Runs a fleet without a coordinator in a temporary directory: bus, store, and agents as processes
//! of this program.

use std::{ffi::OsString, path::Path, process::Stdio, time::Duration};

use anyhow::{Context, bail};
use bus::{
    Bus, ConnectOptions, FactProducer,
    server::{ManagedServer, ServerOptions},
};
use cli::{supervisor::open_log, work_directory::WorkDirectory};
use control::FleetControl;
use rustix::process::{Pid, Signal, kill_process};
use store::Store;
use tokio::{
    process::{Child, Command},
    time::Instant,
};
use wire::v1::{self, agent_status::State};

use crate::flotilla_program::find_flotilla;

/// Longest time from an agent's start to its first `Ready` status.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// Interval between two checks of the statuses.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Lease of a job, in seconds. It is long because no agent fails here.
const LEASE_S: f64 = 30.0;

pub(super) struct FleetFixture {
    pub bus: Bus,
    pub store: Store,
    server: ManagedServer,
    directory: WorkDirectory,
}

pub(super) struct AgentProcess {
    process: Child,
    pub pid: u32,
}

impl FleetFixture {
    pub(super) async fn start() -> anyhow::Result<Self> {
        let directory = WorkDirectory::open_or_create(None, "bench")?;
        let server =
            ManagedServer::start(&ServerOptions::new(directory.as_path().join("nats"))).await?;
        let options = ConnectOptions {
            urls: vec![server.client_url()],
            producer: FactProducer { name: "bench".into(), role: "user".into() },
            ..ConnectOptions::default()
        };
        let bus = Bus::connect(&options).await?;
        bus.prepare_log(1).await?;
        let store = Store::open(&format!("file://{}/store", directory.as_path().display())).await?;
        let config = v1::FleetConfig {
            store: store.url().to_owned(),
            gateway: String::new(),
            lease_s: LEASE_S,
        };
        bus.write_fleet_config(&config).await?;
        Ok(Self { bus, store, server, directory })
    }

    pub(super) fn directory_path(&self) -> &Path {
        self.directory.as_path()
    }

    pub(super) fn server_url(&self) -> String {
        self.server.client_url()
    }

    pub(super) fn control_client(&self) -> FleetControl {
        FleetControl::with_store(self.bus.clone(), self.store.clone())
    }

    pub(super) async fn start_agent(
        &self,
        name: &str,
        roles: &str,
    ) -> anyhow::Result<AgentProcess> {
        let home = self.directory_path().join(name);
        let mut arguments: Vec<OsString> = Vec::new();
        let fixed =
            ["agent", "--nats", &self.server.client_url(), "--roles", roles, "--name", name];
        arguments.extend(fixed.map(OsString::from));
        arguments.extend(["--agent-dir".into(), home.clone().into(), "--die-with-parent".into()]);
        let process = Command::new(find_flotilla()?)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(open_log(&home.join("agent.log"))?)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .context("start an agent")?;
        let pid = process.id().context("the agent ended at once")?;
        let began = Instant::now();
        while !self.is_agent_ready(name).await? {
            if began.elapsed() > READY_LIMIT {
                let log = std::fs::read_to_string(home.join("agent.log")).unwrap_or_default();
                bail!("the agent {name} was not ready within {READY_LIMIT:?}: {log}");
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(AgentProcess { process, pid })
    }

    async fn is_agent_ready(&self, name: &str) -> anyhow::Result<bool> {
        let statuses = self.bus.list_statuses().await?;
        Ok(statuses.iter().any(|status| status.agent == name && status.state() == State::Ready))
    }

    pub(super) async fn stop(self) {
        let Self { bus, store: _, mut server, directory: _directory } = self;
        // Close the client before the server stops; otherwise it logs a lost connection.
        drop(bus);
        tokio::time::sleep(POLL_INTERVAL).await;
        server.stop().await;
    }
}

impl AgentProcess {
    pub(super) async fn stop(mut self) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            // The process may already have ended.
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.process.wait().await;
    }
}
