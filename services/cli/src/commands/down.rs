//! `flotilla down`: stops the `flotilla up` of a directory, and with it the fleet.

use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::{
    fleet::{FleetArgs, FleetFile},
    output,
};

/// Agents, coordinator and bus each need a few seconds.
const STOP_LIMIT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) async fn stop_fleet(fleet: &FleetArgs) -> anyhow::Result<()> {
    let directory = fleet.require_directory()?;
    let file = FleetFile::read(directory)?;
    let pid = file.as_ref().and_then(|file| Pid::from_raw(i32::try_from(file.pid).ok()?));
    let Some(pid) = pid.filter(|pid| is_fleet_process(*pid)) else {
        output::print_message(&format!("no fleet is running in {}", directory.display()));
        return Ok(());
    };
    kill_process(pid, Signal::TERM).context("end the fleet")?;
    let deadline = tokio::time::Instant::now() + STOP_LIMIT;
    while is_fleet_process(pid) {
        if tokio::time::Instant::now() >= deadline {
            bail!(
                "the fleet (process {}) is still running after {STOP_LIMIT:?} (A106)",
                pid.as_raw_nonzero()
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    output::print_message("the fleet is down");
    Ok(())
}

/// The id may belong to another process by now.
fn is_fleet_process(pid: Pid) -> bool {
    let process = std::path::PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
    let named = |path: std::path::PathBuf| path.file_name().map(std::ffi::OsStr::to_owned);
    let program = std::fs::read_link(process.join("exe")).ok().and_then(named);
    let ours = std::env::current_exe().ok().and_then(named);
    let command = std::fs::read(process.join("cmdline")).unwrap_or_default();
    let is_up = command.split(|byte| *byte == 0).any(|argument| argument == b"up");
    // Linux shows a program that was replaced while it runs as "flotilla (deleted)".
    let same = program.zip(ours).is_some_and(|(program, ours)| {
        program.to_string_lossy().starts_with(&*ours.to_string_lossy())
    });
    same && is_up && test_kill_process(pid).is_ok()
}
