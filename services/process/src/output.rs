//! What children print, within bounds.

use std::{
    io::{Read, Write},
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use rustix::process::Signal;

use crate::{ChildPid, set_death_signal};

/// Time to read the rest of the output after the program has ended; it is already in the pipe.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(1);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The end of a text that grows: at most `limit` bytes, cut at a character boundary.
#[derive(Debug, Clone)]
pub struct OutputTail {
    text: String,
    limit: usize,
}

impl OutputTail {
    /// Creates an empty tail.
    pub fn new(limit: usize) -> Self {
        Self { text: String::new(), limit }
    }

    /// Appends text, and drops the oldest above the limit.
    pub fn push_str(&mut self, text: &str) {
        self.text.push_str(text);
        let mut cut = self.text.len().saturating_sub(self.limit);
        while !self.text.is_char_boundary(cut) {
            cut += 1;
        }
        self.text.drain(..cut);
    }

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// The bounds of one run of a program.
#[derive(Debug, Clone, Copy)]
pub struct RunLimits {
    pub time: Duration,
    /// A program that prints more fails.
    pub stdout_bytes: usize,
    /// Bytes kept from the start of stderr; the rest is read and dropped.
    pub stderr_bytes: usize,
}

/// The output and duration of a program that succeeded.
#[derive(Debug)]
pub struct ProgramOutput {
    pub stdout: Vec<u8>,
    pub stderr: String,
    pub wall: Duration,
}

/// The reason why a run has no output.
#[derive(Debug, PartialEq, Eq)]
pub struct RunError {
    /// A description, such as "it ran longer than 5s".
    pub problem: String,
    /// The start of stderr.
    pub stderr: String,
}

/// Runs a program to its end, in a process group that is killed with it, with `input` as its stdin.
/// `observe` is called with its process id every 5 ms while it runs.
///
/// # Errors
/// When the program cannot be started, fails, exceeds a limit, or leaves a process that holds its
/// output open.
pub fn run_program(
    command: &mut Command,
    input: Vec<u8>,
    limits: RunLimits,
    observe: impl FnMut(u32),
) -> Result<ProgramOutput, RunError> {
    let began = Instant::now();
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    // The calling thread waits for the child, so it outlives it.
    set_death_signal(command, Signal::KILL);
    let name = command.get_program().display().to_string();
    let no_output = |problem| RunError { problem, stderr: String::new() };
    let child = command.spawn().map_err(|error| no_output(format!("start {name}: {error}")))?;
    let mut group = ChildGroup(child);
    let (stdin, stdout, stderr) =
        (group.0.stdin.take(), group.0.stdout.take(), group.0.stderr.take());
    // Separate threads, because a process that the program started elsewhere may hold the pipes
    // open forever. A program may also end without reading all of its input.
    std::thread::spawn(move || stdin.map(|mut stdin| stdin.write_all(&input)));
    let output = read_in_background(stdout, limits.stdout_bytes + 1);
    let errors = read_in_background(stderr, limits.stderr_bytes);
    let ended = group.wait_success(limits.time, observe);
    let wall = began.elapsed();
    group.kill_group();
    let stderr = errors.recv_timeout(OUTPUT_TIMEOUT).unwrap_or_default();
    let stderr = String::from_utf8_lossy(&stderr).into_owned();
    let stdout = ended.and_then(|()| {
        let held = |_| "a process that it started keeps its output open".to_owned();
        let stdout = output.recv_timeout(OUTPUT_TIMEOUT).map_err(held)?;
        if stdout.len() > limits.stdout_bytes {
            return Err(format!("it printed more than {} bytes", limits.stdout_bytes));
        }
        Ok(stdout)
    });
    match stdout {
        Ok(stdout) => Ok(ProgramOutput { stdout, stderr, wall }),
        Err(problem) => Err(RunError { problem, stderr }),
    }
}

/// Reads a pipe to its end, so that the program is never blocked, and keeps the first bytes.
fn read_in_background(pipe: Option<impl Read + Send + 'static>, limit: usize) -> Receiver<Vec<u8>> {
    let (send, output) = mpsc::channel();
    std::thread::spawn(move || {
        let (mut kept, mut chunk) = (Vec::new(), vec![0; 64 * 1024]);
        if let Some(mut pipe) = pipe {
            while let Ok(count @ 1..) = pipe.read(&mut chunk) {
                let room = limit.saturating_sub(kept.len()).min(count);
                kept.extend_from_slice(&chunk[..room]);
            }
        }
        // The receiver is gone if it gave up waiting.
        let _ = send.send(kept);
    });
    output
}

/// A child and all processes of its group.
struct ChildGroup(Child);

impl ChildGroup {
    fn wait_success(
        &mut self,
        limit: Duration,
        mut observe: impl FnMut(u32),
    ) -> Result<(), String> {
        let deadline = Instant::now() + limit;
        loop {
            observe(self.0.id());
            match self.0.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(format!("it ended with {status}")),
                Ok(None) if Instant::now() >= deadline => {
                    return Err(format!("it ran longer than {limit:?}"));
                }
                Ok(None) => std::thread::sleep(POLL_INTERVAL),
                Err(error) => return Err(format!("wait for it: {error}")),
            }
        }
    }

    fn kill_group(&self) {
        if let Some(pid) = ChildPid::from_id(self.0.id()) {
            pid.signal_group(Signal::KILL);
        }
    }
}

impl Drop for ChildGroup {
    fn drop(&mut self) {
        self.kill_group();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests;
