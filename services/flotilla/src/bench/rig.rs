//! A fleet without coordinator in a directory of its own: bus, store, and agents as
//! processes of this binary.

use std::{ffi::OsString, path::Path, process::Stdio, time::Duration};

use anyhow::{Context, bail};
use bus::{
    Bus, ConnectOptions, Producer,
    server::{ManagedServer, ServerOptions},
};
use control::Control;
use rustix::process::{Pid, Signal, kill_process};
use store::Store;
use tokio::{
    process::{Child, Command},
    time::Instant,
};
use wire::v1::{self, agent_status::State};

use crate::{directory::Directory, supervise::open_log};

/// From an agent's start to its first word.
const READY_LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);

/// Of agents' work; nobody falls silent here.
const LEASE_S: f64 = 30.0;

pub(super) struct Rig {
    pub bus: Bus,
    pub store: Store,
    server: ManagedServer,
    directory: Directory,
}

pub(super) struct Agent {
    process: Child,
    pub pid: u32,
}

impl Rig {
    pub(super) async fn start() -> anyhow::Result<Self> {
        let directory = Directory::choose(None, "bench")?;
        let server =
            ManagedServer::start(&ServerOptions::new(directory.path().join("nats"))).await?;
        let options = ConnectOptions {
            urls: vec![server.url()],
            producer: Producer { name: "bench".into(), role: "user".into() },
            ..ConnectOptions::default()
        };
        let bus = Bus::connect(&options).await?;
        bus.prepare(1).await?;
        let store = Store::open(&format!("file://{}/store", directory.path().display())).await?;
        let config = v1::FleetConfig {
            store: store.url().to_owned(),
            gateway: String::new(),
            lease_s: LEASE_S,
        };
        bus.set_fleet_config(&config).await?;
        Ok(Self { bus, store, server, directory })
    }

    pub(super) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(super) fn url(&self) -> String {
        self.server.url()
    }

    pub(super) fn control(&self) -> Control {
        Control::with_store(self.bus.clone(), self.store.clone())
    }

    /// An agent that has said that it is ready.
    pub(super) async fn agent(&self, name: &str, roles: &str) -> anyhow::Result<Agent> {
        let home = self.path().join(name);
        let mut arguments: Vec<OsString> = Vec::new();
        let fixed = ["agent", "--nats", &self.server.url(), "--roles", roles, "--name", name];
        arguments.extend(fixed.map(OsString::from));
        arguments.extend(["--agent-dir".into(), home.clone().into(), "--die-with-parent".into()]);
        let process = Command::new(std::env::current_exe().context("find this program")?)
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
        while !self.is_ready(name).await? {
            if began.elapsed() > READY_LIMIT {
                let log = std::fs::read_to_string(home.join("agent.log")).unwrap_or_default();
                bail!("the agent {name} was not ready within {READY_LIMIT:?}: {log}");
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(Agent { process, pid })
    }

    async fn is_ready(&self, name: &str) -> anyhow::Result<bool> {
        let statuses = self.bus.statuses().await?;
        Ok(statuses.iter().any(|status| status.agent == name && status.state() == State::Ready))
    }

    pub(super) async fn stop(self) {
        let Self { bus, store: _, mut server, directory: _directory } = self;
        // Gone before the server is, or it would complain.
        drop(bus);
        tokio::time::sleep(POLL).await;
        server.stop().await;
    }
}

impl Agent {
    pub(super) async fn stop(mut self) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            // It may have ended by itself.
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.process.wait().await;
    }
}
