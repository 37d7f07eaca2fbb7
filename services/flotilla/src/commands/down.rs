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
    let directory = fleet.dir.as_ref().context("pass --dir DIR, the fleet's directory (A103)")?;
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
            bail!(
                "the fleet (process {}) is still up after {LIMIT:?} (A106)",
                pid.as_raw_nonzero()
            );
        }
        tokio::time::sleep(POLL).await;
    }
    output::say("the fleet is down");
    Ok(ExitCode::SUCCESS)
}

/// Whether the process is there and is `flotilla up`; its number may be another's by now.
fn is_up(pid: Pid) -> bool {
    let process = std::path::PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
    let named = |path: std::path::PathBuf| path.file_name().map(std::ffi::OsStr::to_owned);
    let program = std::fs::read_link(process.join("exe")).ok().and_then(named);
    let ours = std::env::current_exe().ok().and_then(named);
    let command = std::fs::read(process.join("cmdline")).unwrap_or_default();
    let is_up = command.split(|byte| *byte == 0).any(|argument| argument == b"up");
    // A binary replaced while it runs is called "flotilla (deleted)".
    let same = program.zip(ours).is_some_and(|(program, ours)| {
        program.to_string_lossy().starts_with(&*ours.to_string_lossy())
    });
    same && is_up && test_kill_process(pid).is_ok()
}
