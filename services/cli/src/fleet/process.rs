//! A fleet on this machine: `flotilla up` as a child process.

use std::{
    path::Path,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context, bail};
use control::FleetControl;
use process::ChildPid;
use rustix::process::Signal;
use tokio::process::{Child, Command};
use tokio::time::Instant;
use wire::{ErrorCode, v1::agent_status::State};

use crate::{output, supervisor::open_log};

use super::{FleetArgs, FleetFile};

/// Maximum time from the start of the first process to the first status of the last agent.
const READY_LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Short, so that a dead agent is replaced soon.
const LEASE_S: &str = "10";

/// A running `flotilla up` process.
pub struct FleetProcess {
    up: Child,
}

/// The options of a fleet to start.
#[derive(Debug, Clone)]
pub struct FleetProcessOptions {
    /// Agents to start, in the format of `flotilla up --agents`.
    pub agents: String,
    /// CPU cores of each agent; `None` shares the machine's cores.
    pub threads: Option<u32>,
    /// If set, the fleet keeps running after this process ends.
    pub detached: bool,
}

impl FleetProcess {
    /// Starts `program up` in a directory and waits until it has written `fleet.json`.
    pub async fn start(
        program: &Path,
        directory: &Path,
        wanted: &FleetProcessOptions,
    ) -> anyhow::Result<Self> {
        let log = directory.join("logs/up.log");
        let mut command = Command::new(program);
        command.arg("up").arg("--dir").arg(directory);
        command.args(["--agents", &wanted.agents, "--lease", LEASE_S]);
        if let Some(threads) = wanted.threads {
            command.args(["--threads", &threads.to_string()]);
        }
        if !wanted.detached {
            command.arg("--die-with-parent");
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(open_log(&log)?).process_group(0);
        let mut up = command.spawn().context("start the fleet")?;
        let began = Instant::now();
        // A file of an earlier fleet has the id of another process.
        while FleetFile::read(directory)?.is_none_or(|file| Some(file.pid) != up.id()) {
            if let Some(status) = up.try_wait()? {
                let reason =
                    output::find_last_error(&std::fs::read_to_string(&log).unwrap_or_default());
                match ErrorCode::find_in_text(&reason) {
                    Some(_) => {
                        return Err(anyhow::Error::msg(reason).context("the fleet did not start"));
                    }
                    None => bail!("the fleet did not start ({status}): {reason} (A106)"),
                }
            }
            if began.elapsed() > READY_LIMIT {
                bail!(
                    "the fleet did not start within {READY_LIMIT:?}; see {} (A106)",
                    log.display()
                );
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(Self { up })
    }

    /// Waits for the end of the process and returns its exit status as text.
    pub async fn wait(&mut self) -> String {
        let status = self.up.wait().await;
        status.map_or_else(|error| error.to_string(), |status: ExitStatus| status.to_string())
    }

    /// Stops the fleet with SIGTERM and waits for its end.
    pub async fn stop(mut self) {
        if let Some(up) = self.up.id().and_then(ChildPid::from_id) {
            up.send_signal(Signal::TERM);
        }
        let _ = self.up.wait().await;
    }

    /// Detaches from the process, which keeps running.
    pub fn detach_process(self) {
        drop(self.up);
    }
}

/// Waits until the services answer and at least `wanted` agents are ready.
pub async fn wait_ready(directory: &Path, wanted: usize) -> anyhow::Result<FleetControl> {
    let at = FleetArgs::in_directory(directory);
    let began = Instant::now();
    loop {
        let missing = match at.connect_control().await {
            Ok(control) => {
                let agents = control.list_agents().await?;
                let here = agents.iter().filter(|agent| agent.state() == State::Ready).count();
                if here >= wanted {
                    output::print_message(&format!("the fleet is up: {wanted} agents"));
                    return Ok(control);
                }
                anyhow::anyhow!("{here} of {wanted} agents are online (A106)")
            }
            Err(error) => error,
        };
        if began.elapsed() > READY_LIMIT {
            return Err(missing.context(format!("the fleet was not ready within {READY_LIMIT:?}")));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
