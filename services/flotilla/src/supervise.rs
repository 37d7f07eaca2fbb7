//! Keeping this binary's other processes running: start, log, restart, stop.

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
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use crate::notify;

/// Before the first restart; doubled for each that follows soon.
const RESTART_FIRST: Duration = Duration::from_millis(200);
const RESTART_CAP: Duration = Duration::from_secs(10);

/// A process that ran for so long counts as healthy again.
const HEALTHY: Duration = Duration::from_secs(30);

/// What a process may take from SIGTERM to its end.
pub(crate) const STOP_LIMIT: Duration = Duration::from_secs(8);

/// A log is started anew beyond this; the one before is kept as `.1`.
const LOG_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Where the last error of a process is looked for.
const LOG_TAIL_BYTES: u64 = 4096;
const LOG_CHECK_EVERY: Duration = Duration::from_secs(10);

/// One of this binary's processes.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub name: String,
    pub arguments: Vec<OsString>,
    pub log: PathBuf,
    /// Whether a clean end means that it was asked to leave, as agents are.
    pub may_leave: bool,
    /// What it may take from SIGTERM to its end.
    pub stop_limit: Duration,
}

impl Member {
    fn spawn(&self) -> anyhow::Result<Child> {
        let program = std::env::current_exe().context("find this program")?;
        let mut command = Command::new(program);
        notify::keep_from(&mut command);
        command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(open_log(&self.log)?)
            // Ctrl-C is for the supervisor, which stops its members in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("start {}", self.name))
    }

    /// Runs the process until `stop`, again and again if need be.
    pub(crate) async fn supervise(self, stop: CancellationToken) {
        let mut pause = RESTART_FIRST;
        while !stop.is_cancelled() {
            let began = tokio::time::Instant::now();
            let logged = std::fs::metadata(&self.log).map_or(0, |log| log.len());
            match self.spawn() {
                Ok(child) => {
                    if self.attend(child, logged, &stop).await.is_break() {
                        return;
                    }
                }
                Err(error) => tracing::error!(name = self.name, error = format!("{error:#}")),
            }
            if began.elapsed() > HEALTHY {
                pause = RESTART_FIRST;
            }
            if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
                pause = (pause * 2).min(RESTART_CAP);
            }
        }
    }

    /// Waits for the process's end; breaks when it should not be started again. Its own log
    /// begins at `logged`.
    async fn attend(
        &self,
        mut child: Child,
        logged: u64,
        stop: &CancellationToken,
    ) -> ControlFlow<()> {
        let mut check = tokio::time::interval(LOG_CHECK_EVERY);
        loop {
            tokio::select! {
                status = child.wait() => {
                    if self.may_leave && status.as_ref().is_ok_and(ExitStatus::success) {
                        tracing::info!(name = self.name, "left, as it was asked to");
                        return ControlFlow::Break(());
                    }
                    let status = status.map_or_else(|error| error.to_string(), |s| s.to_string());
                    let (log, said) = (self.log.display(), last_error(&self.log, logged));
                    let name = &self.name;
                    tracing::warn!(name, status, said, %log, "ended by itself; starting it again");
                    return ControlFlow::Continue(());
                }
                () = stop.cancelled() => {
                    end(&mut child, self.stop_limit).await;
                    return ControlFlow::Break(());
                }
                _ = check.tick() => {
                    if let Err(error) = bound_log(&self.log) {
                        tracing::warn!(name = self.name, %error, "bounding its log");
                    }
                }
            }
        }
    }
}

/// Ends a process in order, by force when it does not listen.
async fn end(child: &mut Child, limit: Duration) {
    signal(child, Signal::TERM);
    if tokio::time::timeout(limit, child.wait()).await.is_err() {
        signal(child, Signal::KILL);
        let _ = child.wait().await;
    }
}

fn signal(child: &Child, signal: Signal) {
    let pid = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    if let Some(pid) = pid {
        // It may have ended by itself.
        let _ = kill_process(pid, signal);
    }
}

pub(crate) fn open_log(path: &Path) -> anyhow::Result<File> {
    let open = || {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        OpenOptions::new().create(true).append(true).open(path)
    };
    open().with_context(|| format!("open the log {}", path.display()))
}

/// The writer appends, so emptying the file under it is safe.
fn bound_log(path: &Path) -> std::io::Result<()> {
    if std::fs::metadata(path)?.len() > LOG_BYTES_MAX {
        std::fs::copy(path, path.with_extension("log.1"))?;
        OpenOptions::new().write(true).open(path)?.set_len(0)?;
    }
    Ok(())
}

/// The error a process ended with, with its causes, as far as its log tells.
fn last_error(log: &Path, from: u64) -> String {
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

/// Asks the kernel to end this process when the one that started it dies.
pub(crate) fn die_with_parent(signal: Signal) {
    let parent = rustix::process::getppid();
    // Fails on no kernel that runs this program.
    let _ = set_parent_process_death_signal(Some(signal));
    if rustix::process::getppid() != parent {
        std::process::exit(1);
    }
}
