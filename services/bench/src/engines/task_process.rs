//! Runs a process until it ends and samples its peak memory.

use std::{
    io::Read,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};

use super::super::procfs::read_status_bytes;

/// Interval between two samples of the memory.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);

/// Longest accepted duration of a task.
const LIMIT: Duration = Duration::from_secs(1200);

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
/// or takes longer than [`LIMIT`], after which it is killed.
pub(super) fn run_task(command: &mut Command) -> anyhow::Result<EndedTask> {
    let began = Instant::now();
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {name}"))?;
    let stdout = read_all(child.stdout.take());
    let stderr = read_all(child.stderr.take());
    let mut peak_rss_bytes = 0;
    let status = loop {
        // The process may end between this sample and the wait: the previous maximum then counts.
        peak_rss_bytes = read_status_bytes(child.id(), "VmHWM")
            .map_or(peak_rss_bytes, |now| peak_rss_bytes.max(now));
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if began.elapsed() > LIMIT {
            child.kill()?;
            child.wait()?;
            bail!("{name} took longer than {LIMIT:?}");
        }
        std::thread::sleep(SAMPLE_INTERVAL);
    };
    let wall = began.elapsed();
    let (stdout, stderr) = (stdout.join(), stderr.join());
    let (stdout, stderr) = (stdout.unwrap_or_default(), stderr.unwrap_or_default());
    if !status.success() {
        let tail: Vec<&str> = stderr.lines().rev().take(8).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        bail!("{name}: {status}\n{}", tail.join("\n"));
    }
    Ok(EndedTask { stdout, stderr, wall, peak_rss_bytes })
}

/// Reads a pipe to its end on a thread of its own.
fn read_all(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // A read error needs no handling: a missing figure is reported as an error later.
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
