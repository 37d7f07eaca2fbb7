//! A child process in its own process group, with an allow-listed environment and a bounded log.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use process::{ChildPid, OutputTail};
use rustix::process::Signal;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::{ChildStdin, ChildStdout},
};

use crate::process_groups::{GroupMember, ProcessGroups};

/// Further output of the child is dropped.
const LOG_BYTES_MAX: usize = 4 * 1024 * 1024;

/// A longer line is split.
const LOG_LINE_BYTES_MAX: u64 = 16 * 1024;

/// The size of the last lines that are kept for a failure fact.
const LOG_TAIL_BYTES_MAX: usize = 4 * 1024;

/// The environment variables that a child inherits. All others must be given explicitly.
const INHERITED_VARIABLES: [&str; 13] = [
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TZ",
    "RUST_LOG",
    "RUST_BACKTRACE",
    "LD_LIBRARY_PATH",
    // These select GPUs of the host.
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION",
];

/// The command line, environment and log of a child to start.
#[derive(Debug, Clone)]
pub struct ChildCommand {
    /// The name that groups this command's children, for signals.
    pub name: String,
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// Variables that are set in addition to the inherited ones.
    pub environment: BTreeMap<String, String>,
    /// Variables that are not inherited although they are on the allow-list.
    pub unset: Vec<String>,
    /// The file that receives the child's stderr; overwritten at each start.
    pub log: PathBuf,
    /// The root of the file system whose kernel log is read: `/` except in tests.
    pub root: PathBuf,
    /// The registry that the child's process group joins.
    pub process_groups: ProcessGroups,
}

/// A running child. Dropping it kills its whole process group.
#[derive(Debug)]
pub struct ChildProcess {
    process: tokio::process::Child,
    pid: Option<ChildPid>,
    member: Option<GroupMember>,
    log_tail: Arc<Mutex<OutputTail>>,
}

impl ChildCommand {
    /// Returns the complete environment of the child: the inherited variables (a fixed allow-list
    /// without `unset`), overridden by the given ones.
    pub fn build_environment(&self) -> BTreeMap<String, OsString> {
        let allowed = INHERITED_VARIABLES
            .iter()
            .filter(|name| !self.unset.iter().any(|unset| unset == *name));
        let inherited = allowed.filter_map(|name| Some(((*name).into(), std::env::var_os(name)?)));
        let given = self.environment.iter().map(|(name, value)| (name.clone(), value.into()));
        inherited.chain(given).collect()
    }

    /// Starts the child in its own process group, with pipes to its stdin and stdout; up to 4 MiB
    /// of its stderr go to the log file, whose directory is created. Fails if the log cannot be
    /// created or the program cannot be started.
    pub fn spawn_child(&self) -> std::io::Result<(ChildProcess, ChildStdin, ChildStdout)> {
        if let Some(directory) = self.log.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let log = std::fs::File::create(&self.log)?;
        let mut process = tokio::process::Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .envs(self.build_environment())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let pipes = process.stdin.take().zip(process.stdout.take()).zip(process.stderr.take());
        let ((stdin, stdout), stderr) = pipes.expect("all three were asked for");
        let pid = process.id().and_then(ChildPid::from_id);
        let member = pid.map(|pid| self.process_groups.register_group(pid, &self.name));
        let tail = Arc::new(Mutex::new(OutputTail::new(LOG_TAIL_BYTES_MAX)));
        tokio::spawn(copy_log(stderr, tokio::fs::File::from_std(log), tail.clone()));
        Ok((ChildProcess { process, pid, member, log_tail: tail }, stdin, stdout))
    }
}

impl ChildProcess {
    /// Returns the process id, which is also the id of the group. Use it only until the child has been waited for: after
    /// that, its process id may belong to another process.
    pub(crate) fn process_id(&self) -> Option<ChildPid> {
        self.pid
    }

    /// Returns the last lines that the child wrote to stderr, at most 4 KiB; empty if there are
    /// none.
    pub fn read_log_tail(&self) -> String {
        self.log_tail.lock().map(|tail| tail.as_str().to_owned()).unwrap_or_default()
    }

    /// Waits at most `limit` for the child to exit. Returns, for users, its exit status, or that it
    /// is still running.
    pub(crate) async fn wait_for_exit(&mut self, limit: Duration) -> String {
        match tokio::time::timeout(limit, self.process.wait()).await {
            Ok(Ok(status)) => {
                // From now on the process id may belong to another process.
                self.member = None;
                status.to_string()
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "still running".to_owned(),
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // A child that was waited for has no id here: its process id may belong to another process.
        if let Some(pid) = self.process.id().and_then(ChildPid::from_id) {
            pid.signal_group(Signal::KILL);
        }
    }
}

/// Copies the child's stderr to the log file, up to its size limit, and keeps the last lines in
/// `tail`.
async fn copy_log(
    stderr: impl tokio::io::AsyncRead + Unpin,
    mut log: tokio::fs::File,
    tail: Arc<Mutex<OutputTail>>,
) {
    let mut lines = BufReader::new(stderr);
    let mut written = 0;
    let mut line = Vec::new();
    while let Ok(1..) = (&mut lines).take(LOG_LINE_BYTES_MAX).read_until(b'\n', &mut line).await {
        if written < LOG_BYTES_MAX && log.write_all(&line).await.is_ok() {
            written += line.len();
        }
        if let Ok(mut tail) = tail.lock() {
            tail.push_str(&String::from_utf8_lossy(&line));
        }
        line.clear();
    }
    let _ = log.flush().await;
}

/// One file for each role and slot, overwritten by the next worker.
pub(crate) fn log_path(directory: &Path, name: &str) -> PathBuf {
    directory.join("logs").join(format!("{name}.log"))
}
