//! `flotilla down`: ends the `flotilla up` of a directory, and with it its fleet.

use std::{process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::{
    fleet::{FleetArgs, FleetFile},
    output,
};

/// Agents, the coordinator and the bus each get a few seconds.
const LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(50);

pub(crate) async fn down(fleet: &FleetArgs) -> anyhow::Result<ExitCode> {
    let directory = fleet.dir.as_ref().context("pass --dir DIR, the fleet's directory")?;
    let file = FleetFile::read(directory)?;
    let pid = file.as_ref().and_then(|file| Pid::from_raw(i32::try_from(file.pid).ok()?));
    let Some(pid) = pid.filter(|pid| is_up(*pid)) else {
        output::say(&format!("no fleet is up in {}", directory.display()));
        return Ok(ExitCode::SUCCESS);
    };
    kill_process(pid, Signal::TERM).context("end the fleet")?;
    let deadline = tokio::time::Instant::now() + LIMIT;
    while is_up(pid) {
        if tokio::time::Instant::now() >= deadline {
            bail!("the fleet (process {}) is still up after {LIMIT:?}", pid.as_raw_nonzero());
        }
        tokio::time::sleep(POLL).await;
    }
    output::say("the fleet is down");
    Ok(ExitCode::SUCCESS)
}

/// Whether the process is there and is this program; its number may be another's by now.
fn is_up(pid: Pid) -> bool {
    let command = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero()));
    let is_ours = command
        .map_or(true, |line| line.split(|byte| *byte == 0).any(|argument| argument == b"up"));
    is_ours && test_kill_process(pid).is_ok()
}
