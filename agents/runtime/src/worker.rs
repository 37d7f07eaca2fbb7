//! A worker process and the calls in flight to it. The same for a warm worker that
//! answers call after call and for a fresh one that answers one and is gone.

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
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::{ChildStdin, ChildStdout},
    sync::mpsc,
};

use crate::{
    Patience,
    child::{Child, Command, Killer},
    protocol::{Answer, FromWorker, LINE_BYTES_MAX, ToWorker},
};

/// Answers a call may have unread; a worker that is faster waits in its pipe.
const ANSWERS_MAX: usize = 256;

/// How long a child may take to be gone once its pipe closed.
const ENDING_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error("start the worker {program}")]
    Start {
        program: String,
        #[source]
        source: std::io::Error,
    },
    /// The worker refused the call; it can go on with others.
    #[error("{0}")]
    Refused(String),
    #[error("the worker died: {0} (E107)")]
    Died(String),
    #[error("the worker was silent for {0:?} (E107)")]
    Silent(Duration),
    #[error("read the worker's answer (E107)")]
    Answer(#[source] serde_json::Error),
}

/// A running worker. Cheap to clone; the process is killed when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Worker {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    child: tokio::sync::Mutex<Child>,
    killer: Killer,
    stdin: tokio::sync::Mutex<ChildStdin>,
    calls: Arc<Calls>,
    next_call: AtomicU64,
    kernel: Option<Mutex<Kernel>>,
}

/// What the kernel has said since the worker was started.
#[derive(Debug)]
struct Kernel {
    log: KernelLog,
    said: String,
}

/// Of that; what comes later is not kept.
const KERNEL_BYTES_MAX: usize = 1 << 20;

/// Who waits for which call. `None` once the worker is gone.
#[derive(Debug)]
struct Calls(Mutex<Option<BTreeMap<u64, mpsc::Sender<Answer>>>>);

impl Worker {
    /// # Errors
    /// When the program cannot be started.
    pub fn start(command: &Command) -> Result<Self, WorkerError> {
        let (child, stdin, stdout) = command.spawn().map_err(|source| WorkerError::Start {
            program: command.program.display().to_string(),
            source,
        })?;
        let calls = Arc::new(Calls(Mutex::new(Some(BTreeMap::new()))));
        tokio::spawn(read_answers(stdout, calls.clone()));
        let shared = Shared {
            killer: child.killer(),
            child: tokio::sync::Mutex::new(child),
            stdin: tokio::sync::Mutex::new(stdin),
            calls,
            next_call: AtomicU64::new(1),
            kernel: kernel_log(&command.root),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Whether the worker can still be called.
    pub fn is_alive(&self) -> bool {
        self.shared.calls.0.lock().is_ok_and(|calls| calls.is_some())
    }

    /// Ends the process at once: calls in flight fail, and there can be no more.
    pub fn kill(&self) {
        self.shared.calls.close();
        self.shared.killer.kill();
    }

    /// Asks the process to end in its own time; what it says until then is heard.
    pub fn terminate(&self) {
        // One that is gone may have left its number to another.
        if self.is_alive() {
            self.shared.killer.terminate();
        }
    }

    /// The last lines the worker wrote to stderr.
    pub async fn log_tail(&self) -> String {
        self.shared.child.lock().await.tail()
    }

    /// What went wrong, with what the worker wrote last.
    pub async fn last_words(&self, error: WorkerError) -> anyhow::Error {
        let tail = self.log_tail().await;
        let last = tail.lines().rev().find(|line| !line.trim().is_empty());
        let last = last.unwrap_or("nothing").trim();
        anyhow::Error::from(error).context(format!("its worker said last: {last}"))
    }

    /// What the kernel has said since the worker was started, if that can be known.
    pub async fn kernel_log(&self) -> String {
        let shared = self.shared.clone();
        let look = move || {
            let mut kernel = shared.kernel.as_ref()?.lock().ok()?;
            if kernel.said.len() < KERNEL_BYTES_MAX {
                let added = kernel.log.added();
                kernel.said.push_str(&added);
            }
            Some(kernel.said.clone())
        };
        tokio::task::spawn_blocking(look).await.ok().flatten().unwrap_or_default()
    }

    /// Calls the worker and waits for its reply; progress is passed on as it comes. A
    /// worker that is silent for longer than `patience` allows counts as hung.
    ///
    /// # Errors
    /// When the worker refuses the call, dies, hangs, or answers something else than expected.
    pub async fn call<R: DeserializeOwned, P: Future<Output = ()> + Send>(
        &self,
        request: &(impl Serialize + Sync),
        patience: &mut Patience,
        mut progress: impl FnMut(Value) -> P + Send,
    ) -> Result<R, WorkerError> {
        let call = self.shared.next_call.fetch_add(1, Ordering::Relaxed);
        let (send, mut answers) = mpsc::channel(ANSWERS_MAX);
        if !self.shared.calls.register(call, send) {
            return Err(self.death().await);
        }
        let _registered = Registered { calls: &self.shared.calls, call };
        if self.send(call, request).await.is_err() {
            return Err(self.death().await);
        }
        loop {
            let limit = patience.limit();
            match tokio::time::timeout(limit, answers.recv()).await {
                Err(_) => return Err(WorkerError::Silent(limit)),
                Ok(None) => return Err(self.death().await),
                Ok(Some(Answer::Progress(value))) => {
                    patience.heard(Instant::now());
                    progress(value).await;
                }
                Ok(Some(Answer::Error(message))) => return Err(WorkerError::Refused(message)),
                Ok(Some(Answer::Reply(value))) => {
                    return serde_json::from_value(value).map_err(WorkerError::Answer);
                }
            }
        }
    }

    async fn send(&self, call: u64, request: &impl Serialize) -> std::io::Result<()> {
        let request = serde_json::to_value(request)?;
        let mut line = serde_json::to_vec(&ToWorker { call, request })?;
        line.push(b'\n');
        let mut stdin = self.shared.stdin.lock().await;
        stdin.write_all(&line).await?;
        stdin.flush().await
    }

    async fn death(&self) -> WorkerError {
        WorkerError::Died(self.shared.child.lock().await.ending(ENDING_LIMIT).await)
    }
}

/// The kernel's log from now on. That it cannot be read is said once.
fn kernel_log(root: &Path) -> Option<Mutex<Kernel>> {
    static SAID: Once = Once::new();
    match KernelLog::from_now(root) {
        Ok(log) => Some(Mutex::new(Kernel { log, said: String::new() })),
        Err(error) => {
            SAID.call_once(|| {
                tracing::info!(
                    %error,
                    "the kernel's log cannot be read: why a worker dies may stay unknown; \
                     CAP_SYSLOG or sysctl kernel.dmesg_restrict=0 would help"
                );
            });
            None
        }
    }
}

impl Calls {
    fn register(&self, call: u64, answers: mpsc::Sender<Answer>) -> bool {
        let Ok(mut calls) = self.0.lock() else { return false };
        calls.as_mut().map(|calls| calls.insert(call, answers)).is_some()
    }

    fn waiting(&self, call: u64) -> Option<mpsc::Sender<Answer>> {
        self.0.lock().ok()?.as_ref()?.get(&call).cloned()
    }

    fn close(&self) {
        if let Ok(mut calls) = self.0.lock() {
            *calls = None;
        }
    }
}

/// Forgets a call when nobody waits for it any more.
struct Registered<'a> {
    calls: &'a Calls,
    call: u64,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        if let Ok(mut calls) = self.calls.0.lock()
            && let Some(calls) = calls.as_mut()
        {
            calls.remove(&self.call);
        }
    }
}

async fn read_answers(stdout: ChildStdout, calls: Arc<Calls>) {
    let mut lines = BufReader::new(stdout);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut lines).take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut line).await;
        if !matches!(read, Ok(1..)) || line.last() != Some(&b'\n') {
            break;
        }
        match serde_json::from_slice::<FromWorker>(&line) {
            Ok(message) => {
                if let Some(waiting) = calls.waiting(message.call) {
                    // The caller may have given up in between.
                    let _ = waiting.send(message.answer).await;
                }
            }
            Err(error) => tracing::warn!(%error, "a worker wrote a line that is no answer"),
        }
    }
    calls.close();
}
