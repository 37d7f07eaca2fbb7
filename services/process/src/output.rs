//! What children print, within bounds.

use std::{
    io::{self, Read, Write},
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use rustix::process::Signal;

use crate::{ChildPid, set_death_signal};

/// Time to read the rest of the output after the program has ended; it is already in the pipe.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(1);

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
    /// The interval at which the program is polled.
    pub poll: Duration,
    /// A program that prints more fails. Its pipe is closed, so a further write ends it.
    pub stdout_bytes: usize,
    /// Bytes kept from the start of stderr; the rest is read and dropped.
    pub stderr_bytes: usize,
    /// If set, a success waits for the end of stderr too, and returns it.
    pub stderr_of_success: bool,
}

impl RunLimits {
    /// Limits of a program that downloads and installs several gigabytes over a slow line.
    pub const INSTALLATION: Self = Self {
        time: Duration::from_secs(3 * 3600),
        poll: Duration::from_millis(100),
        stdout_bytes: 1 << 20,
        stderr_bytes: 4096,
        stderr_of_success: false,
    };
}

/// The output and duration of a program that succeeded.
#[derive(Debug)]
pub struct ProgramOutput {
    pub stdout: Vec<u8>,
    /// Empty unless `stderr_of_success` is set.
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
/// `observe` is called with its process id at each poll while it runs.
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
    let output = read_in_background(move || read_bounded(stdout, limits.stdout_bytes));
    let errors = read_in_background(move || read_start(stderr, limits.stderr_bytes));
    let stderr = || errors.recv_timeout(OUTPUT_TIMEOUT).unwrap_or_default();
    let ended = group.wait_success(&limits, observe);
    let wall = began.elapsed();
    group.kill_group();
    ended.map_err(|problem| RunError { problem, stderr: stderr() })?;
    let held = |_| no_output("a process that it started keeps its output open".to_owned());
    let stdout = output.recv_timeout(OUTPUT_TIMEOUT).map_err(held)?.map_err(no_output)?;
    let stderr = if limits.stderr_of_success { stderr() } else { String::new() };
    Ok(ProgramOutput { stdout, stderr, wall })
}

fn read_in_background<T: Send + 'static>(read: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (send, output) = mpsc::channel();
    // The receiver is gone if it gave up waiting.
    std::thread::spawn(move || send.send(read()));
    output
}

/// Reads a pipe to its end, or closes it when it has more bytes than the limit.
fn read_bounded(pipe: Option<impl Read>, limit: usize) -> Result<Vec<u8>, String> {
    let mut output = Vec::new();
    if let Some(pipe) = pipe {
        let read = pipe.take(limit as u64 + 1).read_to_end(&mut output);
        read.map_err(|error| format!("read its output: {error}"))?;
    }
    if output.len() > limit {
        return Err(format!("it printed more than {limit} bytes"));
    }
    Ok(output)
}

/// Reads a pipe to its end, so that the program is never blocked, and keeps the first bytes.
fn read_start(pipe: Option<impl Read>, limit: usize) -> String {
    let mut kept = Vec::new();
    if let Some(mut pipe) = pipe {
        // After an error, what was read is still worth quoting.
        let _ = pipe.by_ref().take(limit as u64).read_to_end(&mut kept);
        let _ = io::copy(&mut pipe, &mut io::sink());
    }
    String::from_utf8_lossy(&kept).into_owned()
}

/// A child and all processes of its group.
struct ChildGroup(Child);

impl ChildGroup {
    fn wait_success(
        &mut self,
        limits: &RunLimits,
        mut observe: impl FnMut(u32),
    ) -> Result<(), String> {
        let limit = limits.time;
        let deadline = Instant::now() + limit;
        loop {
            observe(self.0.id());
            match self.0.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(format!("it ended with {status}")),
                Ok(None) if Instant::now() >= deadline => {
                    return Err(format!("it ran longer than {limit:?}"));
                }
                Ok(None) => std::thread::sleep(limits.poll),
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
