//! A worker process and the calls in flight to it: a warm worker that answers many calls, or a
//! fresh one that answers one call and exits.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc, Mutex, Once,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use hardware::KernelLog;
use process::ChildPid;
use rustix::process::Signal;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::{ChildStdin, ChildStdout},
    sync::mpsc,
};

use crate::{
    AdaptiveTimeout,
    child::{ChildCommand, ChildProcess},
    worker_protocol::{AnswerMessage, CallMessage, LINE_BYTES_MAX, WorkerAnswer},
};

/// A faster worker blocks on its pipe.
const UNREAD_ANSWERS_MAX: usize = 256;

/// The time within which a child must exit once its pipe is closed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// The reason why a call to a worker failed.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error("start the worker {program}")]
    Start {
        program: String,
        #[source]
        source: std::io::Error,
    },
    /// The worker refused the call; it can serve others.
    #[error("{0}")]
    Refused(String),
    /// The worker exited; the text describes its exit status.
    #[error("the worker died: {0} (E107)")]
    Died(String),
    /// The worker sent no message for this long, and counts as hung.
    #[error("the worker was silent for {0:?} (E107)")]
    Silent(Duration),
    #[error("read the worker's answer (E107)")]
    UnreadableReply(#[source] serde_json::Error),
}

/// A running worker process. Cheap to clone; the process is killed when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct WorkerProcess {
    shared: Arc<WorkerState>,
}

#[derive(Debug)]
struct WorkerState {
    child: tokio::sync::Mutex<ChildProcess>,
    process_id: Option<ChildPid>,
    stdin: tokio::sync::Mutex<ChildStdin>,
    calls: Arc<CallRegistry>,
    next_call: AtomicU64,
    kernel_messages: Option<Mutex<KernelMessages>>,
}

/// The kernel's messages since the worker was started.
#[derive(Debug)]
struct KernelMessages {
    log: KernelLog,
    text: String,
}

/// No more are read after this size.
const KERNEL_LOG_BYTES_MAX: usize = 1 << 20;

/// The receivers of the answers, by call number. `None` once the worker is gone.
#[derive(Debug)]
struct CallRegistry(Mutex<Option<BTreeMap<u64, mpsc::Sender<WorkerAnswer>>>>);

impl WorkerProcess {
    /// Starts a worker process, which answers calls on its stdin and stdout. Must be called in a
    /// tokio runtime. Fails with [`WorkerError::Start`] if the program or its log cannot be opened.
    pub fn start(command: &ChildCommand) -> Result<Self, WorkerError> {
        // Before the worker starts: one that dies at once has a cause, too.
        let kernel_messages = open_kernel_log(&command.root);
        let (child, stdin, stdout) = command.spawn_child().map_err(|source| {
            WorkerError::Start { program: command.program.display().to_string(), source }
        })?;
        let calls = Arc::new(CallRegistry(Mutex::new(Some(BTreeMap::new()))));
        tokio::spawn(read_answers(stdout, calls.clone()));
        let shared = WorkerState {
            process_id: child.process_id(),
            child: tokio::sync::Mutex::new(child),
            stdin: tokio::sync::Mutex::new(stdin),
            calls,
            next_call: AtomicU64::new(1),
            kernel_messages,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns true if the worker can still be called: it was not killed and its stdout has not
    /// ended. A hung worker counts as alive.
    pub fn is_alive(&self) -> bool {
        self.shared.calls.0.lock().is_ok_and(|calls| calls.is_some())
    }

    /// Kills the process group at once: calls in flight fail, and later ones are refused.
    pub fn kill_group(&self) {
        self.shared.calls.close();
        if let Some(pid) = self.shared.process_id {
            pid.signal_group(Signal::KILL);
        }
    }

    /// Sends SIGTERM to the process, so that it exits by itself; its answers are still read until
    /// then. Does nothing if it is gone.
    pub fn request_exit(&self) {
        // The process id of a worker that is gone may belong to another process.
        if self.is_alive()
            && let Some(pid) = self.shared.process_id
        {
            pid.send_signal(Signal::TERM);
        }
    }

    /// Returns the last lines that the worker wrote to stderr, at most 4 KiB, also after its death.
    pub async fn log_tail(&self) -> String {
        self.shared.child.lock().await.read_log_tail()
    }

    /// Wraps the error in one that contains the last line that the worker wrote to stderr.
    pub async fn add_last_log_line(&self, error: WorkerError) -> anyhow::Error {
        let tail = self.log_tail().await;
        let last = tail.lines().rev().find(|line| !line.trim().is_empty());
        let last = last.unwrap_or("nothing").trim();
        anyhow::Error::from(error).context(format!("last output of its worker: {last}"))
    }

    /// Returns the kernel's messages since the worker was started, up to about 1 MiB; empty if they
    /// cannot be read.
    pub async fn read_kernel_log(&self) -> String {
        let shared = self.shared.clone();
        let look = move || {
            let mut kernel = shared.kernel_messages.as_ref()?.lock().ok()?;
            if kernel.text.len() < KERNEL_LOG_BYTES_MAX {
                let added = kernel.log.read_new_lines();
                kernel.text.push_str(&added);
            }
            Some(kernel.text.clone())
        };
        tokio::task::spawn_blocking(look).await.ok().flatten().unwrap_or_default()
    }

    /// Calls the worker and waits for its reply; `progress` receives progress messages as they
    /// arrive. Several calls may be in flight. A worker that is silent for longer than `patience`
    /// permits counts as hung, but is not killed.
    ///
    /// # Errors
    /// When the worker refuses the call, dies, hangs, or sends a reply of another form than
    /// expected.
    pub async fn call_with_progress<R: DeserializeOwned, P: Future<Output = ()> + Send>(
        &self,
        request: &(impl Serialize + Sync),
        patience: &mut AdaptiveTimeout,
        mut progress: impl FnMut(Value) -> P + Send,
    ) -> Result<R, WorkerError> {
        let call = self.shared.next_call.fetch_add(1, Ordering::Relaxed);
        let (send, mut answers) = mpsc::channel(UNREAD_ANSWERS_MAX);
        if !self.shared.calls.register_call(call, send) {
            return Err(self.death_error().await);
        }
        let _registered = CallRegistration { calls: &self.shared.calls, call };
        if self.write_call(call, request).await.is_err() {
            return Err(self.death_error().await);
        }
        loop {
            let limit = patience.current_limit();
            match tokio::time::timeout(limit, answers.recv()).await {
                Err(_) => return Err(WorkerError::Silent(limit)),
                Ok(None) => return Err(self.death_error().await),
                Ok(Some(WorkerAnswer::Progress(value))) => {
                    patience.record_message(Instant::now());
                    progress(value).await;
                }
                Ok(Some(WorkerAnswer::Error(message))) => {
                    return Err(WorkerError::Refused(message));
                }
                Ok(Some(WorkerAnswer::Reply(value))) => {
                    return serde_json::from_value(value).map_err(WorkerError::UnreadableReply);
                }
            }
        }
    }

    async fn write_call(&self, call: u64, request: &impl Serialize) -> std::io::Result<()> {
        let request = serde_json::to_value(request)?;
        let mut line = serde_json::to_vec(&CallMessage { call, request })?;
        line.push(b'\n');
        let mut stdin = self.shared.stdin.lock().await;
        stdin.write_all(&line).await?;
        stdin.flush().await
    }

    async fn death_error(&self) -> WorkerError {
        WorkerError::Died(self.shared.child.lock().await.wait_for_exit(EXIT_TIMEOUT).await)
    }
}

/// Reads what is added from now on. If the log cannot be read, that is logged once in this process.
fn open_kernel_log(root: &Path) -> Option<Mutex<KernelMessages>> {
    static SAID: Once = Once::new();
    match KernelLog::from_now(root) {
        Ok(log) => Some(Mutex::new(KernelMessages { log, text: String::new() })),
        Err(error) => {
            SAID.call_once(|| {
                tracing::info!(
                    %error,
                    "kernel log not readable, so the cause of a worker's death may stay unknown; \
                     grant CAP_SYSLOG or set sysctl kernel.dmesg_restrict=0"
                );
            });
            None
        }
    }
}

impl CallRegistry {
    /// Returns false if the worker is gone.
    fn register_call(&self, call: u64, answers: mpsc::Sender<WorkerAnswer>) -> bool {
        let Ok(mut calls) = self.0.lock() else { return false };
        calls.as_mut().map(|calls| calls.insert(call, answers)).is_some()
    }

    fn find_caller(&self, call: u64) -> Option<mpsc::Sender<WorkerAnswer>> {
        self.0.lock().ok()?.as_ref()?.get(&call).cloned()
    }

    /// Drops all receivers, so that all calls in flight fail and later ones are refused.
    fn close(&self) {
        if let Ok(mut calls) = self.0.lock() {
            *calls = None;
        }
    }
}

/// The registration of one call, removed when this is dropped.
struct CallRegistration<'a> {
    calls: &'a CallRegistry,
    call: u64,
}

impl Drop for CallRegistration<'_> {
    fn drop(&mut self) {
        if let Ok(mut calls) = self.calls.0.lock()
            && let Some(calls) = calls.as_mut()
        {
            calls.remove(&self.call);
        }
    }
}

/// Closes the registry when the pipe closes, breaks off or contains an overlong line.
async fn read_answers(stdout: ChildStdout, calls: Arc<CallRegistry>) {
    let mut lines = BufReader::new(stdout);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut lines).take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut line).await;
        if !matches!(read, Ok(1..)) || line.last() != Some(&b'\n') {
            break;
        }
        match serde_json::from_slice::<AnswerMessage>(&line) {
            Ok(message) => {
                if let Some(waiting) = calls.find_caller(message.call) {
                    // The caller may have given up meanwhile.
                    let _ = waiting.send(message.answer).await;
                }
            }
            Err(error) => tracing::warn!(%error, "worker wrote a line that is not an answer"),
        }
    }
    calls.close();
}
