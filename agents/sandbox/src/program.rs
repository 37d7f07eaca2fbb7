//! What is asked of a sandbox: a program, its limits, and what came of it.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

/// What programs see of the box beyond its system directories.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Directories or files that are shown, read-only, at their own paths: toolchains that are
    /// not below `/usr`. What is named must exist.
    pub read_only: Vec<PathBuf>,
    /// What is hidden even where it lies below something shown: an agent's own directories.
    /// Wins over `read_only`. May not exist yet; then there is nothing to hide.
    pub hidden: Vec<PathBuf>,
}

/// A program to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Its name, looked up in `PATH` unless it has a slash, and its arguments.
    pub argv: Vec<String>,
    /// Added to `PATH`, `HOME`, `LANG` and `TMPDIR`, or instead of them. It gets no others.
    pub env: Vec<(String, String)>,
    /// Given to it as its input. It need not read it.
    #[serde(skip)]
    pub stdin: Vec<u8>,
}

/// What a program and all it starts may use together, unless it says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// From its start to its end.
    pub wall: Duration,
    /// Resident memory. Without a cgroup it is looked at fifty times a second, and one process
    /// may reserve no more than twice of it between two looks.
    pub memory_bytes: u64,
    /// Processes and threads at once.
    pub processes: u32,
    /// What may be written to the room, which is memory too; also the largest file.
    pub disk_bytes: u64,
    /// Of stdout and stderr together. Beyond it the program is ended.
    pub output_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            wall: Duration::from_secs(10),
            memory_bytes: 1 << 30,
            processes: 128,
            disk_bytes: 256 << 20,
            output_bytes: 1 << 20,
        }
    }
}

/// What came of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    pub how: How,
    /// No longer, together with `stderr`, than its limit.
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// From its start to its end, without the sandbox's own work before and after.
    pub wall: Duration,
}

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    /// By itself, with this code.
    Exited(i32),
    /// By this signal, its own or one of its processes'.
    Signalled(i32),
    /// Ended at its wall-clock limit.
    TimedOut,
    /// Ended because it used more memory than its limit.
    OutOfMemory,
    /// Ended because it wrote more than its limit.
    OutputTooLong,
    /// It could not be executed, and why: no such file, not executable.
    NotStarted(String),
}
