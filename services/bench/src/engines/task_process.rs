//! Runs a process until it ends and samples its peak memory.

use std::{process::Command, time::Duration};

use anyhow::bail;
use process::RunLimits;

use super::super::procfs::read_status_bytes;

const LIMITS: RunLimits = RunLimits {
    time: Duration::from_secs(1200),
    poll: Duration::from_millis(20),
    stdout_bytes: 64 << 20,
    stderr_bytes: 64 << 20,
    stderr_of_success: true,
};

/// The output, duration and peak memory of a process that succeeded.
pub(super) struct EndedTask {
    pub stdout: String,
    pub stderr: String,
    pub wall: Duration,
    /// Peak resident memory of this process, without its children.
    pub peak_rss_bytes: u64,
}

/// Runs a command until it ends.
///
/// # Errors
///
/// Fails if the command cannot start, exits with an error (the last 8 lines of stderr are included)
/// or takes longer than 20 minutes, after which it is killed.
pub(super) fn run_task(command: &mut Command) -> anyhow::Result<EndedTask> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut peak_rss_bytes = 0;
    // The process may end between this sample and the wait: the previous maximum then counts.
    let sample = |process_id| {
        peak_rss_bytes = read_status_bytes(process_id, "VmHWM")
            .map_or(peak_rss_bytes, |now| peak_rss_bytes.max(now));
    };
    match process::run_program(command, Vec::new(), LIMITS, sample) {
        Ok(output) => Ok(EndedTask {
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: output.stderr,
            wall: output.wall,
            peak_rss_bytes,
        }),
        Err(error) => {
            let tail: Vec<&str> = error.stderr.lines().rev().take(8).collect();
            let tail: Vec<&str> = tail.into_iter().rev().collect();
            bail!("{name}: {}\n{}", error.problem, tail.join("\n"));
        }
    }
}
