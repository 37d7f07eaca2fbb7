//! A child process in its own process group, with an allow-listed environment and a bounded log.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::{ChildStdin, ChildStdout},
};

use crate::process_groups::{GroupMember, ProcessGroups};

/// The size limit of a log file; further output of the child is dropped.
const LOG_BYTES_MAX: usize = 4 * 1024 * 1024;

/// The limit of one log line; a longer line is split.
const LOG_LINE_BYTES_MAX: u64 = 16 * 1024;

/// The size of the last log lines that are kept for a failure fact.
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
    /// The executable.
    pub program: PathBuf,
    /// The arguments, without the program.
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
    group: Option<Pid>,
    member: Option<GroupMember>,
    log_tail: Arc<Mutex<String>>,
}

impl ChildCommand {
    /// Returns the complete environment of the child: the inherited variables, then the given ones.
    pub fn build_environment(&self) -> BTreeMap<String, OsString> {
        let allowed = INHERITED_VARIABLES
            .iter()
            .filter(|name| !self.unset.iter().any(|unset| unset == *name));
        let inherited = allowed.filter_map(|name| Some(((*name).into(), std::env::var_os(name)?)));
        let given = self.environment.iter().map(|(name, value)| (name.clone(), value.into()));
        inherited.chain(given).collect()
    }

    /// Starts the child with pipes to its stdin and stdout; its stderr goes to the log.
    ///
    /// # Errors
    /// When the log cannot be created or the program cannot be started.
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
        let group = process.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let member = group.map(|group| self.process_groups.register_group(group, &self.name));
        let tail = Arc::new(Mutex::new(String::new()));
        tokio::spawn(copy_log(stderr, tokio::fs::File::from_std(log), tail.clone()));
        Ok((ChildProcess { process, group, member, log_tail: tail }, stdin, stdout))
    }
}

/// A copyable handle that ends a child's process group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProcessKiller(Option<Pid>);

impl ProcessKiller {
    /// Sends SIGTERM to the child alone; the child must end the processes that it started.
    pub(crate) fn terminate_child(self) {
        if let Some(child) = self.0 {
            // The process may be gone already.
            let _ = kill_process(child, Signal::TERM);
        }
    }

    /// Sends SIGKILL to the whole process group.
    pub(crate) fn kill_group(self) {
        if let Some(group) = self.0 {
            // The group may be gone already.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl ChildProcess {
    /// Returns a handle that ends the child. Use it only until the child has been waited for: after
    /// that, its process id may belong to another process.
    pub(crate) fn process_killer(&self) -> ProcessKiller {
        ProcessKiller(self.group)
    }

    /// Returns the last lines that the child wrote to stderr, at most 4 KiB.
    pub fn read_log_tail(&self) -> String {
        self.log_tail.lock().map(|tail| tail.clone()).unwrap_or_default()
    }

    /// Waits at most `limit` for the child to exit, and describes the exit status for users.
    pub async fn wait_for_exit(&mut self, limit: Duration) -> String {
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
        if self.process.id().is_some() {
            self.process_killer().kill_group();
        }
    }
}

/// Copies the child's stderr to the log file, up to its size limit, and keeps the last lines in
/// `tail`. Returns when stderr closes.
async fn copy_log(
    stderr: impl tokio::io::AsyncRead + Unpin,
    mut log: tokio::fs::File,
    tail: Arc<Mutex<String>>,
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
            shorten_tail(&mut tail);
        }
        line.clear();
    }
    let _ = log.flush().await;
}

/// Cuts the text from the front to at most 4 KiB, at a character boundary.
fn shorten_tail(tail: &mut String) {
    let mut cut = tail.len().saturating_sub(LOG_TAIL_BYTES_MAX);
    while !tail.is_char_boundary(cut) {
        cut += 1;
    }
    tail.drain(..cut);
}

/// Returns the path of a worker's log: one file for each role and slot, overwritten by the next
/// worker.
pub(crate) fn log_path(directory: &Path, name: &str) -> PathBuf {
    directory.join("logs").join(format!("{name}.log"))
}
