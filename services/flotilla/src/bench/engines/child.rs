//! A process to its end, with its peak memory.

use std::{
    io::Read,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};

use super::super::processes::status_bytes;

/// Between two looks at its memory.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// No task takes as long.
const LIMIT: Duration = Duration::from_secs(1200);

pub(super) struct Ended {
    pub stdout: String,
    pub stderr: String,
    pub wall: Duration,
    /// Of this one process; its children's are not counted.
    pub peak_rss_bytes: u64,
}

pub(super) fn run(command: &mut Command) -> anyhow::Result<Ended> {
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
        // Gone between the look and the wait: what was seen before counts.
        peak_rss_bytes =
            status_bytes(child.id(), "VmHWM").map_or(peak_rss_bytes, |now| peak_rss_bytes.max(now));
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if began.elapsed() > LIMIT {
            child.kill()?;
            child.wait()?;
            bail!("{name} took longer than {LIMIT:?}");
        }
        std::thread::sleep(LOOK_EVERY);
    };
    let wall = began.elapsed();
    let (stdout, stderr) = (stdout.join(), stderr.join());
    let (stdout, stderr) = (stdout.unwrap_or_default(), stderr.unwrap_or_default());
    if !status.success() {
        let tail: Vec<&str> = stderr.lines().rev().take(8).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        bail!("{name}: {status}\n{}", tail.join("\n"));
    }
    Ok(Ended { stdout, stderr, wall, peak_rss_bytes })
}

fn read_all(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What cannot be read is not missed: the figure's absence is an error of its own.
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
