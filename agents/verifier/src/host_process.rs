//! A program that runs on this host with bounds on its time and its output. It runs in its own
//! process group, which is killed with it. Not for programs that models wrote or that a spec names;
//! those are contained, or masked (`grants`).

use std::{
    ffi::OsString,
    io::{Read, Write},
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};

/// The limit of a program's stdout.
pub(crate) const OUTPUT_BYTES_MAX: u64 = 64 * 1024;

/// The number of stderr bytes that an error message quotes.
const STDERR_BYTES_MAX: usize = 300;

/// The prefix of the worker's own variables, such as keys of judge models. Programs do not receive
/// them.
const OWN_VARIABLE_PREFIX: &str = "FLOTILLA_";

/// The time to read the remaining output after the program has ended; it is already in the pipe.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(1);

/// The interval at which the end of the program is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Runs a program to its end and returns its stdout.
///
/// # Errors
/// Returns a description if the program fails, exceeds `limit`, or prints more than
/// `OUTPUT_BYTES_MAX`.
pub(crate) fn run_program(
    argv: &[OsString],
    input: Vec<u8>,
    limit: Duration,
) -> Result<Vec<u8>, String> {
    let mut group = ChildGroup(spawn_child(argv)?);
    let (stdin, stdout, stderr) =
        (group.0.stdin.take(), group.0.stdout.take(), group.0.stderr.take());
    // Separate threads, because a process that the program started elsewhere may hold the pipes
    // open forever. A program may also end without reading all of its input.
    std::thread::spawn(move || stdin.map(|mut stdin| stdin.write_all(&input)));
    let (send, output) = mpsc::channel();
    std::thread::spawn(move || send.send(read_bounded(stdout)));
    let (send_errors, errors) = mpsc::channel();
    std::thread::spawn(move || send_errors.send(read_stderr_start(stderr)));
    let ended = group.wait_success(limit);
    group.kill_group();
    ended.map_err(|problem| {
        match errors.recv_timeout(OUTPUT_TIMEOUT).unwrap_or_default().trim() {
            "" => problem,
            said => format!("{problem}: {said}"),
        }
    })?;
    let held = |_| "a process that it started keeps its output open".to_owned();
    output.recv_timeout(OUTPUT_TIMEOUT).map_err(held)?
}

/// Starts a program in its own process group. It is killed when this process dies.
fn spawn_child(argv: &[OsString]) -> Result<Child, String> {
    let (program, arguments) = argv.split_first().ok_or("argv is empty")?;
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(OWN_VARIABLE_PREFIX.as_bytes()) {
            command.env_remove(name);
        }
    }
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    #[expect(unsafe_code, reason = "the closure makes one system call and allocates nothing")]
    // SAFETY: prctl is safe between fork and exec. The spawning thread waits for the child, so the
    // child cannot die before it has finished.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
    }
    command.spawn().map_err(|error| format!("start {}: {error}", program.display()))
}

/// Reads stdout to its end.
///
/// # Errors
/// Returns an error above `OUTPUT_BYTES_MAX`.
fn read_bounded(stdout: Option<impl Read>) -> Result<Vec<u8>, String> {
    let mut output = Vec::new();
    let stdout = stdout.ok_or("no stdout")?;
    stdout
        .take(OUTPUT_BYTES_MAX + 1)
        .read_to_end(&mut output)
        .map_err(|error| format!("read its output: {error}"))?;
    if output.len() as u64 > OUTPUT_BYTES_MAX {
        return Err(format!("it printed more than {OUTPUT_BYTES_MAX} bytes"));
    }
    Ok(output)
}

/// Reads stderr to its end, so that the program is never blocked, and keeps the first bytes.
fn read_stderr_start(stderr: Option<impl Read>) -> String {
    let Some(mut stderr) = stderr else { return String::new() };
    let (mut kept, mut chunk) = (Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = stderr.read(&mut chunk) {
        let room = STDERR_BYTES_MAX.saturating_sub(kept.len()).min(count);
        kept.extend_from_slice(&chunk[..room]);
    }
    String::from_utf8_lossy(&kept).into_owned()
}

/// A child and all processes of its group.
struct ChildGroup(Child);

impl ChildGroup {
    /// Waits until the child has ended with success.
    ///
    /// # Errors
    /// Returns a description of a failure, or of the exceeded limit.
    fn wait_success(&mut self, limit: Duration) -> Result<(), String> {
        let deadline = Instant::now() + limit;
        loop {
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

    /// Kills all processes of the group.
    fn kill_group(&self) {
        if let Some(group) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            // The group may have ended already.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Drop for ChildGroup {
    fn drop(&mut self) {
        self.kill_group();
        let _ = self.0.wait();
    }
}
