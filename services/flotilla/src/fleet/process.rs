//! A fleet of this machine: `flotilla up` as a process of its own.

use std::{
    path::Path,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context, bail};
use control::Control;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::Instant;
use wire::v1::agent_status::State;

use crate::{output, supervise::open_log};

use super::{FleetArgs, FleetFile};

/// From the start of the first process to the last agent's first word.
const READY_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// An agent that dies is replaced soon.
const LEASE_S: &str = "10";

pub(crate) struct FleetProcess {
    up: Child,
}

/// What to start.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    /// As `flotilla up --agents` reads it.
    pub agents: String,
    /// Cores for each of them; otherwise they share the machine's.
    pub threads: Option<u32>,
    /// It goes on without us.
    pub outlives: bool,
}

impl FleetProcess {
    pub(crate) async fn start(directory: &Path, wanted: &Wanted) -> anyhow::Result<Self> {
        if let Some(before) = FleetFile::read(directory)? {
            // A stale file would be taken for the new fleet's.
            let _ = std::fs::remove_file(FleetFile::path(directory));
            tracing::debug!(?before, "a fleet was up here before");
        }
        let log = directory.join("logs/up.log");
        let mut command = Command::new(std::env::current_exe().context("find this program")?);
        command.arg("up").arg("--dir").arg(directory);
        command.args(["--agents", &wanted.agents, "--lease", LEASE_S]);
        if let Some(threads) = wanted.threads {
            command.args(["--threads", &threads.to_string()]);
        }
        if !wanted.outlives {
            command.arg("--die-with-parent");
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(open_log(&log)?).process_group(0);
        let mut up = command.spawn().context("start the fleet")?;
        let began = Instant::now();
        while FleetFile::read(directory)?.is_none() {
            if let Some(status) = up.try_wait()? {
                let told = std::fs::read_to_string(&log).unwrap_or_default();
                bail!("the fleet did not start ({status}): {} (A106)", last_error(&told));
            }
            if began.elapsed() > READY_LIMIT {
                bail!(
                    "the fleet did not start within {READY_LIMIT:?}; see {} (A106)",
                    log.display()
                );
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(Self { up })
    }

    pub(crate) async fn wait(&mut self) -> String {
        let status = self.up.wait().await;
        status.map_or_else(|error| error.to_string(), |status: ExitStatus| status.to_string())
    }

    pub(crate) async fn stop(mut self) {
        let pid = self.up.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(pid) = pid {
            // It may have ended by itself.
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.up.wait().await;
    }

    /// The process goes on without us.
    pub(crate) fn leave(self) {
        drop(self.up);
    }
}

fn last_error(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    let start = lines.iter().rposition(|line| line.starts_with("error:")).unwrap_or(0);
    lines[start..].join(" ")
}

/// Waits until the services answer and so many agents have said that they are there.
pub(crate) async fn ready(directory: &Path, wanted: usize) -> anyhow::Result<Control> {
    let at = FleetArgs { dir: Some(directory.to_owned()), ..FleetArgs::default() };
    let began = Instant::now();
    loop {
        let missing = match at.control().await {
            Ok(control) => {
                let agents = control.agents().await?;
                let here = agents.iter().filter(|agent| agent.state() == State::Ready).count();
                if here >= wanted {
                    output::say(&format!("the fleet is up: {wanted} agents"));
                    return Ok(control);
                }
                anyhow::anyhow!("{here} of {wanted} agents are there (A106)")
            }
            Err(error) => error,
        };
        if began.elapsed() > READY_LIMIT {
            return Err(missing.context(format!("the fleet was not ready within {READY_LIMIT:?}")));
        }
        tokio::time::sleep(POLL).await;
    }
}
