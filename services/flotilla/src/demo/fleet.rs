//! The demo's fleet: `flotilla up` as a process of its own.

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

use crate::{
    cli::DemoArgs,
    fleet::{FleetArgs, FleetFile},
    output,
    supervise::open_log,
};

/// From the start of the first process to the last agent's first word.
const READY_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// An agent of the demo that dies is replaced soon.
const LEASE_S: &str = "10";

pub(super) struct DemoFleet {
    up: Child,
}

impl DemoFleet {
    pub(super) async fn start(directory: &Path, args: &DemoArgs) -> anyhow::Result<Self> {
        if let Some(before) = FleetFile::read(directory)? {
            // A stale file would be taken for the new fleet's.
            let _ = std::fs::remove_file(FleetFile::path(directory));
            tracing::debug!(?before, "a fleet was up here before");
        }
        let agents = format!("trainer,generator={},verifier,evaluator=2", args.generators);
        let log = directory.join("logs/up.log");
        let mut command = Command::new(std::env::current_exe().context("find this program")?);
        command
            .arg("up")
            .arg("--dir")
            .arg(directory)
            .args(["--agents", &agents, "--lease", LEASE_S]);
        if !args.keep {
            command.arg("--die-with-parent");
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(open_log(&log)?).process_group(0);
        let mut up = command.spawn().context("start the fleet")?;
        let began = Instant::now();
        while FleetFile::read(directory)?.is_none() {
            if let Some(status) = up.try_wait()? {
                let told = std::fs::read_to_string(&log).unwrap_or_default();
                bail!("the fleet did not start ({status}): {}", last_error(&told));
            }
            if began.elapsed() > READY_LIMIT {
                bail!("the fleet did not start within {READY_LIMIT:?}; see {}", log.display());
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(Self { up })
    }

    pub(super) async fn wait(&mut self) -> String {
        let status = self.up.wait().await;
        status.map_or_else(|error| error.to_string(), |status: ExitStatus| status.to_string())
    }

    pub(super) async fn stop(mut self) {
        let pid = self.up.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(pid) = pid {
            // It may have ended by itself.
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.up.wait().await;
    }

    /// The process goes on without us.
    pub(super) fn leave(self) {
        drop(self.up);
    }
}

fn last_error(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    let start = lines.iter().rposition(|line| line.starts_with("error:")).unwrap_or(0);
    lines[start..].join(" ")
}

/// Waits until the services answer and every agent has said that it is there.
pub(super) async fn ready(at: &FleetArgs, generators: u32) -> anyhow::Result<Control> {
    let wanted = generators as usize + 4;
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
                anyhow::anyhow!("{here} of {wanted} agents are there")
            }
            Err(error) => error,
        };
        if began.elapsed() > READY_LIMIT {
            return Err(missing.context(format!("the fleet was not ready within {READY_LIMIT:?}")));
        }
        tokio::time::sleep(POLL).await;
    }
}
