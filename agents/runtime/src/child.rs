//! A child process in its own group, with an allow-listed environment and a bounded log.

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

use crate::herd::{Herd, Member};

/// What a log file may hold; what a worker writes beyond is dropped.
const LOG_BYTES_MAX: usize = 4 * 1024 * 1024;

/// A longer line is cut in two.
const LINE_BYTES_MAX: u64 = 16 * 1024;

/// The last lines kept for a failure fact.
const TAIL_BYTES_MAX: usize = 4 * 1024;

/// Variables a worker inherits. Everything else must be given to it.
const INHERITED: [&str; 13] = [
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TZ",
    "RUST_LOG",
    "RUST_BACKTRACE",
    "LD_LIBRARY_PATH",
    // Which of a box's GPUs is meant.
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION",
];

/// How to start a child.
#[derive(Debug, Clone)]
pub struct Command {
    /// Tells its children from others.
    pub name: String,
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    pub environment: BTreeMap<String, String>,
    /// Not inherited, though on the allow-list.
    pub unset: Vec<String>,
    pub log: PathBuf,
    /// Of the file system whose kernel log is looked at: `/` but for tests.
    pub root: PathBuf,
    /// Which the child joins.
    pub herd: Herd,
}

/// A running child. Dropping it kills its whole process group.
#[derive(Debug)]
pub struct Child {
    process: tokio::process::Child,
    group: Option<Pid>,
    member: Option<Member>,
    tail: Arc<Mutex<String>>,
}

impl Command {
    /// All that the child will find in its environment.
    pub fn variables(&self) -> BTreeMap<String, OsString> {
        let allowed =
            INHERITED.iter().filter(|name| !self.unset.iter().any(|unset| unset == *name));
        let inherited = allowed.filter_map(|name| Some(((*name).into(), std::env::var_os(name)?)));
        let given = self.environment.iter().map(|(name, value)| (name.clone(), value.into()));
        inherited.chain(given).collect()
    }

    /// Starts the child with pipes to its stdin and stdout; its stderr goes to the log.
    ///
    /// # Errors
    /// When the log cannot be created or the program cannot be started.
    pub fn spawn(&self) -> std::io::Result<(Child, ChildStdin, ChildStdout)> {
        if let Some(directory) = self.log.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let log = std::fs::File::create(&self.log)?;
        let mut process = tokio::process::Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .envs(self.variables())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let pipes = process.stdin.take().zip(process.stdout.take()).zip(process.stderr.take());
        let ((stdin, stdout), stderr) = pipes.expect("all three were asked for");
        let group = process.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let member = group.map(|group| self.herd.join(group, &self.name));
        let tail = Arc::new(Mutex::new(String::new()));
        tokio::spawn(keep_log(stderr, tokio::fs::File::from_std(log), tail.clone()));
        Ok((Child { process, group, member, tail }, stdin, stdout))
    }
}

/// Ends a child's process group, from wherever.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Killer(Option<Pid>);

impl Killer {
    /// Tells the child alone: what it started is its own to end.
    pub(crate) fn terminate(self) {
        if let Some(child) = self.0 {
            // It may be gone already.
            let _ = kill_process(child, Signal::TERM);
        }
    }

    pub(crate) fn kill(self) {
        if let Some(group) = self.0 {
            // The group may be gone already.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Child {
    /// Only for as long as the child was not waited for: its number may then be another's.
    pub(crate) fn killer(&self) -> Killer {
        Killer(self.group)
    }

    /// The last lines the child wrote to stderr.
    pub fn tail(&self) -> String {
        self.tail.lock().map(|tail| tail.clone()).unwrap_or_default()
    }

    /// How the child ended, for people. Waits at most `limit`.
    pub async fn ending(&mut self, limit: Duration) -> String {
        match tokio::time::timeout(limit, self.process.wait()).await {
            Ok(Ok(status)) => {
                // Its number may be another's from now on.
                self.member = None;
                status.to_string()
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "still running".to_owned(),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // A child that was waited for has no id; its number may be somebody else's by now.
        if self.process.id().is_some() {
            self.killer().kill();
        }
    }
}

async fn keep_log(
    stderr: impl tokio::io::AsyncRead + Unpin,
    mut log: tokio::fs::File,
    tail: Arc<Mutex<String>>,
) {
    let mut lines = BufReader::new(stderr);
    let mut written = 0;
    let mut line = Vec::new();
    while let Ok(1..) = (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line).await {
        if written < LOG_BYTES_MAX && log.write_all(&line).await.is_ok() {
            written += line.len();
        }
        if let Ok(mut tail) = tail.lock() {
            tail.push_str(&String::from_utf8_lossy(&line));
            shorten(&mut tail);
        }
        line.clear();
    }
    let _ = log.flush().await;
}

/// Cuts from the front, at a character boundary.
fn shorten(tail: &mut String) {
    let mut cut = tail.len().saturating_sub(TAIL_BYTES_MAX);
    while !tail.is_char_boundary(cut) {
        cut += 1;
    }
    tail.drain(..cut);
}

/// Where a worker's log goes: one file a role and slot, overwritten by the next worker.
pub(crate) fn log_file(directory: &Path, name: &str) -> PathBuf {
    directory.join("logs").join(format!("{name}.log"))
}
