//! One of llama.cpp's programs at work: in our process group, dead when we are, both pipes read
//! to their end whatever comes, and only a bounded part of it kept.

use std::{
    ffi::OsString,
    io::{self, Read, Write},
    path::Path,
    process::{Command, ExitStatus, Stdio},
    sync::mpsc::{self, Receiver, SyncSender},
    thread,
    time::Duration,
};

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

use crate::Environment;

/// A longer line is cut.
const LINE_BYTES_MAX: usize = 16 * 1024;

/// Of each pipe. What comes after is read and dropped, so that a flood neither blocks the child
/// nor counts as a sign of life.
const PIPE_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Of stderr, repeated on our own for whoever keeps our log.
const REPEATED_BYTES_MAX: usize = 1024 * 1024;

/// Lines read ahead; a child that is faster waits in its pipe.
const LINES_AHEAD: usize = 256;

/// The last of what it printed, for errors.
const TAIL_BYTES_MAX: usize = 2 * 1024;

/// A running program. Dropping it ends the process.
#[derive(Debug)]
pub struct Child {
    process: std::process::Child,
    lines: Receiver<Line>,
    tail: String,
}

/// What a program printed, without the line's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub stream: Stream,
    pub text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// What happened within a wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    Line(Line),
    Nothing,
    /// Both pipes are closed.
    Ended,
}

impl Child {
    /// Starts a program with no input. What it writes to stderr is repeated on ours if asked.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(
        program: &Path,
        arguments: impl IntoIterator<Item = OsString>,
        environment: &Environment,
        repeat: bool,
    ) -> io::Result<Self> {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .envs(environment.variables())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        die_with_us(&mut command);
        let mut process = command.spawn()?;
        let (send, lines) = mpsc::sync_channel(LINES_AHEAD);
        let stdout = process.stdout.take().expect("it was asked for");
        let stderr = process.stderr.take().expect("it was asked for");
        drain(stdout, Stream::Stdout, send.clone(), 0);
        drain(stderr, Stream::Stderr, send, if repeat { REPEATED_BYTES_MAX } else { 0 });
        Ok(Self { process, lines, tail: String::new() })
    }

    /// Waits for a line.
    pub fn hear(&mut self, limit: Duration) -> Heard {
        match self.lines.recv_timeout(limit) {
            Ok(line) => {
                self.tail.push_str(&line.text);
                self.tail.push('\n');
                shorten(&mut self.tail);
                Heard::Line(line)
            }
            Err(mpsc::RecvTimeoutError::Timeout) => Heard::Nothing,
            Err(mpsc::RecvTimeoutError::Disconnected) => Heard::Ended,
        }
    }

    /// The last that was heard of it.
    pub fn tail(&self) -> &str {
        &self.tail
    }

    /// How it ended, if it did.
    ///
    /// # Errors
    /// When the system cannot say.
    pub fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.process.try_wait()
    }

    /// Asks it to end.
    pub fn terminate(&self) {
        if let Some(pid) =
            i32::try_from(self.process.id()).ok().and_then(rustix::process::Pid::from_raw)
        {
            // It may have ended by itself; until it is waited for, its number is its own.
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
    }

    /// Ends it, or sees that it has ended.
    ///
    /// # Errors
    /// When the system cannot say how it ended.
    pub fn end(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.process.try_wait()? {
            return Ok(status);
        }
        self.process.kill()?;
        self.process.wait()
    }

    /// Waits until it ends by itself, at most so long.
    ///
    /// # Errors
    /// When the system cannot say how it ended.
    pub fn wait(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
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

impl Drop for Child {
    fn drop(&mut self) {
        // It may have ended, and been waited for, already.
        let _ = self.end();
    }
}

/// The kernel ends the child with the thread that started it: that must be one that stays.
#[expect(unsafe_code, reason = "pre_exec is the only way to set a parent death signal")]
fn die_with_us(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    let parent = getpid();
    // SAFETY: between fork and exec only two system calls are made; nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // We may have died before the signal was set.
            if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
        });
    }
}

fn drain(pipe: impl Read + Send + 'static, stream: Stream, lines: SyncSender<Line>, repeat: usize) {
    thread::spawn(move || {
        let mut lines = Lines { stream, send: lines, line: Vec::new(), repeat };
        lines.read(pipe);
    });
}

/// One pipe, cut into lines.
struct Lines {
    stream: Stream,
    send: SyncSender<Line>,
    line: Vec<u8>,
    /// Bytes still to be repeated on our stderr.
    repeat: usize,
}

impl Lines {
    fn read(&mut self, mut pipe: impl Read) {
        let (mut buffer, mut read) = (vec![0; 64 * 1024], 0_usize);
        loop {
            match pipe.read(&mut buffer) {
                Ok(0) => break,
                Ok(bytes) if read < PIPE_BYTES_MAX => {
                    read += bytes;
                    self.repeat(&buffer[..bytes]);
                    self.cut(&buffer[..bytes]);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.finish();
    }

    fn cut(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = LINE_BYTES_MAX - self.line.len();
            self.line.extend_from_slice(&piece[..piece.len().min(room)]);
            if piece.ends_with(b"\n") || self.line.len() == LINE_BYTES_MAX {
                self.finish();
            }
        }
    }

    fn finish(&mut self) {
        let text = String::from_utf8_lossy(&self.line);
        let text = text.trim_end_matches(['\n', '\r']).to_owned();
        self.line.clear();
        if !text.is_empty() {
            // Nobody listens any more: the child is being ended.
            let _ = self.send.send(Line { stream: self.stream, text });
        }
    }

    fn repeat(&mut self, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(self.repeat)];
        self.repeat -= bytes.len();
        // Our own stderr may be closed.
        let _ = io::stderr().write_all(bytes);
    }
}

/// Cuts from the front, at a character boundary.
fn shorten(tail: &mut String) {
    let mut cut = tail.len().saturating_sub(TAIL_BYTES_MAX);
    while !tail.is_char_boundary(cut) {
        cut += 1;
    }
    tail.drain(..cut);
}
