//! The task that owns one process: it writes requests, reads answers and stderr, and ends the
//! process when it breaks the protocol, is too slow, or is not needed any more.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};

use process::OutputTail;
use serde_json::{Map, Value};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{ChildStderr, ChildStdin, ChildStdout},
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until, timeout_at},
};

use crate::{
    LineBounds, LineFailure, LineProgramError,
    answer_lines::{AnswerLines, LineTooLong, parse_answer},
    launch::LaunchedProgram,
    unsent_lines::UnsentLines,
};

const READ_CHUNK_BYTES: usize = 16 << 10;

/// Characters of an invalid line that an error quotes.
const EXCERPT_CHARS_MAX: usize = 100;

/// Time for the exit of a process that closed its stdout, and for the rest of its stderr.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);
const STDERR_TIMEOUT: Duration = Duration::from_millis(200);

pub(crate) type LineReply = Result<Map<String, Value>, LineProgramError>;

/// Shared by the handles and the task of one process.
#[derive(Debug, Default)]
pub(crate) struct ProgramShared {
    pub(crate) next_id: AtomicU64,
    /// The error of requests that come too late, once the process has ended.
    pub(crate) end: OnceLock<LineProgramError>,
    /// True after the failure of the process was counted.
    pub(crate) is_counted: AtomicBool,
}

/// A request on its way to a process.
#[derive(Debug)]
pub(crate) struct PendingLine {
    pub id: u64,
    pub line: Vec<u8>,
    pub deadline: Instant,
    pub timeout: Duration,
    pub reply: oneshot::Sender<LineReply>,
}

/// A request that a process has not answered yet.
#[derive(Debug)]
struct OutstandingLine {
    deadline: Instant,
    timeout: Duration,
    reply: oneshot::Sender<LineReply>,
}

/// The reason why the task ends its process.
enum ProcessEnd {
    /// All handles were dropped.
    Unneeded,
    /// Stdout was closed.
    Closed,
    TimedOut,
    BadAnswer(String),
}

#[derive(Debug)]
pub(crate) struct ProgramTask {
    launched: LaunchedProgram,
    stdin: Option<ChildStdin>,
    stdout: ChildStdout,
    stderr: ChildStderr,
    bounds: LineBounds,
    requests: mpsc::Receiver<PendingLine>,
    shared: Arc<ProgramShared>,
    outstanding: BTreeMap<u64, OutstandingLine>,
    unsent: UnsentLines,
    answers: AnswerLines,
    stderr_tail: OutputTail,
    stderr_is_open: bool,
    has_answered: bool,
}

impl ProgramTask {
    pub(crate) fn new(
        mut launched: LaunchedProgram,
        bounds: LineBounds,
        requests: mpsc::Receiver<PendingLine>,
        shared: Arc<ProgramShared>,
    ) -> Result<Self, String> {
        let pipes = launched.take_pipes().ok_or("it was started without pipes")?;
        let open = |error: std::io::Error| format!("open its pipes: {error}");
        Ok(Self {
            launched,
            stdin: Some(ChildStdin::from_std(pipes.stdin).map_err(open)?),
            stdout: ChildStdout::from_std(pipes.stdout).map_err(open)?,
            stderr: ChildStderr::from_std(pipes.stderr).map_err(open)?,
            bounds,
            requests,
            shared,
            outstanding: BTreeMap::new(),
            unsent: UnsentLines::default(),
            answers: AnswerLines::new(bounds.answer_bytes_max),
            stderr_tail: OutputTail::new(bounds.stderr_bytes_max),
            stderr_is_open: true,
            has_answered: false,
        })
    }

    /// Serves requests until the process ends or is not needed any more, and ends it.
    pub(crate) async fn run(mut self) {
        let end = self.serve_requests().await;
        let is_slow = matches!(end, ProcessEnd::TimedOut);
        let problem = match end {
            ProcessEnd::Unneeded => {
                self.stop_gracefully().await;
                String::new()
            }
            ProcessEnd::Closed => {
                let status = self.launched.wait_exit(EXIT_TIMEOUT).await;
                let closed = "it closed its stdout".to_owned();
                status.map_or(closed, |status| format!("it ended with {status}"))
            }
            ProcessEnd::TimedOut => String::new(),
            ProcessEnd::BadAnswer(problem) => problem,
        };
        // The next process must not run beside this one.
        drop(self.launched);
        let stderr = read_rest(&mut self.stderr, self.stderr_tail).await;
        let error = LineProgramError { failure: LineFailure::Broken, problem, stderr };
        // A request that was not sent may succeed in another process.
        let unsent = match is_slow {
            true => LineProgramError::interrupted(),
            false => LineProgramError { failure: LineFailure::Interrupted, ..error.clone() },
        };
        let _ = self.shared.end.set(unsent.clone());
        self.requests.close();
        let now = Instant::now();
        for line in self.outstanding.into_values() {
            let reply = match (is_slow, line.deadline <= now) {
                (false, _) => error.clone(),
                (true, false) => LineProgramError::interrupted(),
                (true, true) => LineProgramError {
                    failure: LineFailure::TimedOut,
                    problem: format!("it did not answer within {:?}", line.timeout),
                    stderr: error.stderr.clone(),
                },
            };
            // The caller may have stopped waiting.
            let _ = line.reply.send(Err(reply));
        }
        while let Some(line) = self.requests.recv().await {
            let _ = line.reply.send(Err(unsent.clone()));
        }
    }

    async fn serve_requests(&mut self) -> ProcessEnd {
        let (mut chunk, mut stderr_chunk) = ([0; READ_CHUNK_BYTES], [0; READ_CHUNK_BYTES]);
        loop {
            let deadline = self.outstanding.values().map(|line| line.deadline).min();
            let (Some(stdin), unsent) = (&mut self.stdin, self.unsent.remaining_bytes()) else {
                return ProcessEnd::Unneeded;
            };
            tokio::select! {
                request = self.requests.recv() => match request {
                    Some(request) => self.accept_request(request),
                    None => return ProcessEnd::Unneeded,
                },
                written = stdin.write(unsent), if !unsent.is_empty() => match written {
                    Ok(bytes) => self.unsent.record_written(bytes),
                    // It stopped reading. Its end or its silence is noticed below.
                    Err(_) => self.unsent = UnsentLines::default(),
                },
                read = self.stdout.read(&mut chunk) => match read {
                    Ok(bytes) if bytes > 0 => {
                        self.answers.push_bytes(&chunk[..bytes]);
                        if let Err(problem) = self.take_answers() {
                            return ProcessEnd::BadAnswer(problem);
                        }
                    }
                    _ => return ProcessEnd::Closed,
                },
                read = self.stderr.read(&mut stderr_chunk), if self.stderr_is_open => match read {
                    Ok(bytes) if bytes > 0 => {
                        let text = String::from_utf8_lossy(&stderr_chunk[..bytes]);
                        self.stderr_tail.push_str(&text);
                    }
                    _ => self.stderr_is_open = false,
                },
                () = wait_until(deadline) => return ProcessEnd::TimedOut,
            }
        }
    }

    fn accept_request(&mut self, request: PendingLine) {
        let PendingLine { id, line, deadline, timeout, reply } = request;
        let more = if self.has_answered { Duration::ZERO } else { self.bounds.start_timeout };
        let deadline = deadline + more;
        self.outstanding.insert(id, OutstandingLine { deadline, timeout: timeout + more, reply });
        self.unsent.push_line(&line);
    }

    /// Answers the requests of all complete lines. Fails with the problem of an invalid line.
    fn take_answers(&mut self) -> Result<(), String> {
        loop {
            let line = match self.answers.take_line() {
                Ok(Some(line)) => line,
                Ok(None) => return Ok(()),
                Err(LineTooLong) => {
                    let bytes_max = self.bounds.answer_bytes_max;
                    return Err(format!("it wrote a line of more than {bytes_max} bytes"));
                }
            };
            let (id, answer) = parse_answer(&line).map_err(|problem| {
                format!("it wrote a line that is no answer ({problem}): {}", excerpt_line(&line))
            })?;
            let known = self.outstanding.remove(&id);
            let line = known.ok_or_else(|| {
                format!("it answered a request with id {id}, which is unknown or answered already")
            })?;
            self.has_answered = true;
            // The caller may have stopped waiting.
            let _ = line.reply.send(Ok(answer));
        }
    }

    /// Closes stdin and waits for the end of the process. A process that still has to answer a
    /// request is not waited for.
    async fn stop_gracefully(&mut self) {
        self.stdin = None;
        if self.outstanding.is_empty() {
            // It is killed with the task if it does not end.
            let _ = self.launched.wait_exit(self.bounds.stop_timeout).await;
        }
    }
}

/// Reads the rest of the stderr of a killed process, and returns the end of its stderr.
async fn read_rest(stderr: &mut ChildStderr, mut tail: OutputTail) -> String {
    let mut chunk = [0; READ_CHUNK_BYTES];
    let deadline = Instant::now() + STDERR_TIMEOUT;
    while let Ok(Ok(bytes @ 1..)) = timeout_at(deadline, stderr.read(&mut chunk)).await {
        tail.push_str(&String::from_utf8_lossy(&chunk[..bytes]));
    }
    tail.as_str().trim().to_owned()
}

/// Waits for the deadline; without one, forever.
async fn wait_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

fn excerpt_line(line: &[u8]) -> String {
    String::from_utf8_lossy(line).trim().chars().take(EXCERPT_CHARS_MAX).collect()
}
