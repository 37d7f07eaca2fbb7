//! A supervised llama.cpp program.
//!
//! The child runs in our process group and dies with the thread that started it. Both of its pipes
//! are read to their end, and only a bounded part of the output is kept. The owner of a program
//! reads its lines ([`ProgramOutput`]); that of a server need not.

use std::{
    ffi::OsString,
    io::{self, Read, Write},
    path::Path,
    process::{Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver, SyncSender},
    },
    thread,
    time::Duration,
};

use process::{ChildPid, OutputTail, set_death_signal};
use rustix::process::Signal;

use crate::ProcessEnvironment;

/// The rest of a longer line is cut off.
const LINE_BYTES_MAX: usize = 16 * 1024;

/// Later bytes of a pipe are read and dropped, so that a flood of output neither blocks the child
/// nor counts as progress.
const PIPE_BYTES_MAX: usize = 64 * 1024 * 1024;

/// The bytes of the child's stderr that are copied to our stderr, for the log of this process.
const ECHO_BYTES_MAX: usize = 1024 * 1024;

/// Lines that wait for the owner.
const QUEUED_LINES_MAX: usize = 256;

/// The end of the output that is kept for error messages.
const TAIL_BYTES_MAX: usize = 2 * 1024;

/// A running llama.cpp program. Dropping it kills the process.
///
/// Two threads read the pipes and send lines over a bounded channel. The owner polls:
///
/// ```text
/// spawn_program -> wait_event ... wait_event (Closed) -> wait_exit -> kill_and_wait
/// ```
#[derive(Debug)]
pub struct LlamaProcess {
    process: std::process::Child,
    lines: Receiver<ProcessLine>,
    tail: Arc<Mutex<OutputTail>>,
}

/// The use of a program's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramOutput {
    /// The owner reads all lines; until then, the program may block on its pipe.
    Lines,
    /// The same; the start of stderr is also copied to our stderr.
    RepeatedLines,
    /// The log of a server, whose start is copied to our stderr. Lines that the owner does not read
    /// in time are dropped: the server never blocks on its pipe.
    Log,
}

/// One line that a program printed, without its line ending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessLine {
    pub stream: ProcessStream,
    /// With invalid UTF-8 replaced.
    pub text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessStream {
    Stdout,
    Stderr,
}

/// The result of a wait for output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    Line(ProcessLine),
    TimedOut,
    /// Both pipes are closed.
    Closed,
}

impl LlamaProcess {
    /// Starts a program with an empty stdin and exactly the variables of `environment`. The kernel
    /// kills the program when the calling thread ends, so that thread must outlive it.
    pub(crate) fn spawn_program(
        program: &Path,
        arguments: impl IntoIterator<Item = OsString>,
        environment: &ProcessEnvironment,
        output: ProgramOutput,
    ) -> io::Result<Self> {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .envs(environment.all_variables())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        set_death_signal(&mut command, Signal::KILL);
        let mut process = command.spawn()?;
        let (send, lines) = mpsc::sync_channel(QUEUED_LINES_MAX);
        let stdout = process.stdout.take().expect("it was asked for");
        let stderr = process.stderr.take().expect("it was asked for");
        let tail = Arc::new(Mutex::new(OutputTail::new(TAIL_BYTES_MAX)));
        let splitter = |stream, echo_bytes_left| LineSplitter {
            stream,
            send: send.clone(),
            waits_for_owner: output != ProgramOutput::Log,
            tail: tail.clone(),
            line: Vec::new(),
            echo_bytes_left,
        };
        let repeated = if output == ProgramOutput::Lines { 0 } else { ECHO_BYTES_MAX };
        read_in_background(stdout, splitter(ProcessStream::Stdout, 0));
        read_in_background(stderr, splitter(ProcessStream::Stderr, repeated));
        Ok(Self { process, lines, tail })
    }

    /// Waits for the next line, at most `limit`.
    pub(crate) fn wait_event(&mut self, limit: Duration) -> ProcessEvent {
        match self.lines.recv_timeout(limit) {
            Ok(line) => ProcessEvent::Line(line),
            Err(mpsc::RecvTimeoutError::Timeout) => ProcessEvent::TimedOut,
            Err(mpsc::RecvTimeoutError::Disconnected) => ProcessEvent::Closed,
        }
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.process.id()
    }

    /// Returns the end of the output so far.
    pub(crate) fn output_tail(&self) -> String {
        lock_tail(&self.tail).as_str().to_owned()
    }

    /// Returns the exit status, or `None` while the program runs.
    pub fn exit_status(&mut self) -> io::Result<Option<ExitStatus>> {
        self.process.try_wait()
    }

    /// Asks the program to end (SIGTERM).
    pub(crate) fn send_sigterm(&self) {
        // The process id is not reused until the program is waited for.
        if let Some(pid) = ChildPid::from_id(self.process.id()) {
            pid.send_signal(Signal::TERM);
        }
    }

    /// Kills the program unless it has ended, and returns its exit status.
    pub(crate) fn kill_and_wait(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.process.try_wait()? {
            return Ok(status);
        }
        self.process.kill()?;
        self.process.wait()
    }

    /// Waits until the program ends by itself, at most `limit`. Returns `None` if it still runs.
    pub fn wait_exit(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        const LOOK_EVERY: Duration = Duration::from_millis(10);
        let until = std::time::Instant::now() + limit;
        loop {
            match self.process.try_wait()? {
                None if std::time::Instant::now() < until => thread::sleep(LOOK_EVERY),
                other => return Ok(other),
            }
        }
    }
}

impl Drop for LlamaProcess {
    fn drop(&mut self) {
        // The program may have ended, and been waited for, already.
        let _ = self.kill_and_wait();
    }
}

fn lock_tail(tail: &Mutex<OutputTail>) -> MutexGuard<'_, OutputTail> {
    tail.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read_in_background(pipe: impl Read + Send + 'static, mut lines: LineSplitter) {
    thread::spawn(move || lines.read_pipe(pipe));
}

struct LineSplitter {
    stream: ProcessStream,
    send: SyncSender<ProcessLine>,
    /// False to drop lines for which the queue has no room.
    waits_for_owner: bool,
    tail: Arc<Mutex<OutputTail>>,
    /// The current, unfinished line.
    line: Vec<u8>,
    /// The bytes that are still copied to our stderr.
    echo_bytes_left: usize,
}

impl LineSplitter {
    /// Bytes after the first `PIPE_BYTES_MAX` are dropped.
    fn read_pipe(&mut self, mut pipe: impl Read) {
        let (mut buffer, mut read) = (vec![0; 64 * 1024], 0_usize);
        loop {
            match pipe.read(&mut buffer) {
                Ok(0) => break,
                Ok(bytes) if read < PIPE_BYTES_MAX => {
                    read += bytes;
                    self.echo_to_stderr(&buffer[..bytes]);
                    self.split_lines(&buffer[..bytes]);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.send_line();
    }

    /// Sends each line that is complete or full.
    fn split_lines(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = LINE_BYTES_MAX - self.line.len();
            self.line.extend_from_slice(&piece[..piece.len().min(room)]);
            if piece.ends_with(b"\n") || self.line.len() == LINE_BYTES_MAX {
                self.send_line();
            }
        }
    }

    /// Sends the current line unless it is empty.
    fn send_line(&mut self) {
        let text = String::from_utf8_lossy(&self.line);
        let text = text.trim_end_matches(['\n', '\r']).to_owned();
        self.line.clear();
        if text.is_empty() {
            return;
        }
        {
            let mut tail = lock_tail(&self.tail);
            tail.push_str(&text);
            tail.push_str("\n");
        }
        let line = ProcessLine { stream: self.stream, text };
        // The receiver is gone if the child is being ended.
        if self.waits_for_owner {
            let _ = self.send.send(line);
        } else {
            let _ = self.send.try_send(line);
        }
    }

    fn echo_to_stderr(&mut self, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(self.echo_bytes_left)];
        self.echo_bytes_left -= bytes.len();
        // Our own stderr may be closed.
        let _ = io::stderr().write_all(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a shell that prints far more than a pipe and the queue of lines hold. Returns true if
    /// it ended although nobody read its lines, and the end of its output.
    fn run_unread(output: ProgramOutput) -> (bool, String) {
        let script = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; echo last";
        let arguments = ["-c", script].map(OsString::from);
        let environment = ProcessEnvironment::default();
        let shell = Path::new("/bin/sh");
        let mut process =
            LlamaProcess::spawn_program(shell, arguments, &environment, output).unwrap();
        let limit = Duration::from_secs(if output == ProgramOutput::Log { 60 } else { 1 });
        let has_ended = process.wait_exit(limit).unwrap().is_some();
        while has_ended && process.wait_event(limit) != ProcessEvent::Closed {}
        (has_ended, process.output_tail())
    }

    #[test]
    fn a_server_whose_log_nobody_reads_never_blocks_on_it() {
        let (has_ended, tail) = run_unread(ProgramOutput::Log);
        assert!(has_ended && tail.ends_with("line 19999\nlast\n"), "{tail}");
        assert!(!run_unread(ProgramOutput::Lines).0, "all its lines are for its owner");
    }
}
