//! Supervision of this binary's other processes: start, log, restart with backoff, stop.

use std::{
    ffi::OsString,
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom},
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::Context;
use process::terminate_child;
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use crate::service_notify;

/// Backoff before the first restart, doubled for each restart that follows soon.
const RESTART_BACKOFF_MIN: Duration = Duration::from_millis(200);
/// Maximum backoff between two restarts.
const RESTART_BACKOFF_MAX: Duration = Duration::from_secs(10);

/// Run time after which a process counts as healthy, which resets its backoff.
const HEALTHY_AFTER: Duration = Duration::from_secs(30);

/// Default time that a process has between SIGTERM and SIGKILL.
pub(crate) const STOP_LIMIT: Duration = Duration::from_secs(8);

/// Size at which a log is rotated; the previous log is kept as `.log.1`.
const LOG_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Bytes at the end of a log that are searched for the last error.
const LOG_TAIL_BYTES: u64 = 4096;
/// Interval between two checks of a log's size.
const LOG_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// A process of this binary that is kept running.
///
/// Life cycle: start → running → ended by itself → backoff (200 ms, doubled up to 10 s) → start. A
/// run of more than 30 s resets the backoff. Supervision ends when the stop token is cancelled, or
/// when the process exits with success and `may_exit` is set.
#[derive(Debug, Clone)]
pub(crate) struct SupervisedProcess {
    pub name: String,
    pub arguments: Vec<OsString>,
    pub log: PathBuf,
    /// If set, a successful exit is final: agents exit so when they are drained.
    pub may_exit: bool,
    /// Time between SIGTERM and SIGKILL.
    pub stop_limit: Duration,
}

impl SupervisedProcess {
    /// Starts the process in its own process group, with its stderr appended to its log.
    fn spawn_child(&self) -> anyhow::Result<Child> {
        let program = std::env::current_exe().context("find this program")?;
        let mut command = Command::new(program);
        service_notify::clear_environment(&mut command);
        command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(open_log(&self.log)?)
            // Ctrl-C reaches only the supervisor, which stops its processes in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("start {}", self.name))
    }

    /// Runs the process until `stop` is cancelled, and restarts it with backoff when it ends.
    pub(crate) async fn run_until_stopped(self, stop: CancellationToken) {
        let mut pause = RESTART_BACKOFF_MIN;
        while !stop.is_cancelled() {
            let began = tokio::time::Instant::now();
            let logged = std::fs::metadata(&self.log).map_or(0, |log| log.len());
            match self.spawn_child() {
                Ok(child) => {
                    if self.watch_child(child, logged, &stop).await.is_break() {
                        return;
                    }
                }
                Err(error) => tracing::error!(name = self.name, error = format!("{error:#}")),
            }
            if began.elapsed() > HEALTHY_AFTER {
                pause = RESTART_BACKOFF_MIN;
            }
            if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
                pause = (pause * 2).min(RESTART_BACKOFF_MAX);
            }
        }
    }

    /// Waits for the end of the process, and bounds its log meanwhile. Breaks if the process must
    /// not be restarted.
    ///
    /// `logged` is the size of the log when the process started; the last error is searched after
    /// it.
    async fn watch_child(
        &self,
        mut child: Child,
        logged: u64,
        stop: &CancellationToken,
    ) -> ControlFlow<()> {
        let mut check = tokio::time::interval(LOG_CHECK_INTERVAL);
        loop {
            tokio::select! {
                status = child.wait() => {
                    if self.may_exit && status.as_ref().is_ok_and(ExitStatus::success) {
                        tracing::info!(name = self.name, "exited on request");
                        return ControlFlow::Break(());
                    }
                    let status = status.map_or_else(|error| error.to_string(), |s| s.to_string());
                    let (log, said) = (self.log.display(), read_last_error(&self.log, logged));
                    let name = &self.name;
                    tracing::warn!(name, status, said, %log, "exited unexpectedly; restarting it");
                    return ControlFlow::Continue(());
                }
                () = stop.cancelled() => {
                    terminate_child(&mut child, self.stop_limit).await;
                    return ControlFlow::Break(());
                }
                _ = check.tick() => {
                    if let Err(error) = rotate_log(&self.log) {
                        tracing::warn!(name = self.name, %error, "bounding its log");
                    }
                }
            }
        }
    }
}

/// Opens a log for appending, and creates it and its directory if they are missing.
pub fn open_log(path: &Path) -> anyhow::Result<File> {
    let open = || {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        OpenOptions::new().create(true).append(true).open(path)
    };
    open().with_context(|| format!("open the log {}", path.display()))
}

/// Moves a log that is too large to `.log.1` and empties it. The writer appends, so truncating the
/// file under it is safe.
fn rotate_log(path: &Path) -> std::io::Result<()> {
    if std::fs::metadata(path)?.len() > LOG_BYTES_MAX {
        std::fs::copy(path, path.with_extension("log.1"))?;
        OpenOptions::new().write(true).open(path)?.set_len(0)?;
    }
    Ok(())
}

/// Returns the last error in a log after byte `from`, with its causes, on one line. Empty if the
/// log has no error in its last 4 KiB.
fn read_last_error(log: &Path, from: u64) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let last = file.metadata()?.len().saturating_sub(LOG_TAIL_BYTES);
        file.seek(SeekFrom::Start(last.max(from)))?;
        let mut tail = Vec::new();
        file.read_to_end(&mut tail)?;
        Ok(String::from_utf8_lossy(&tail).into_owned())
    };
    let tail = read().unwrap_or_default();
    let error = tail.rfind("error: ").map_or("", |at| &tail[at..]);
    error.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}
