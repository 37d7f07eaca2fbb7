//! The interface of a sandbox: a program, its limits and its result.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

/// The host's paths that programs see in addition to the system directories.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathVisibility {
    /// Directories or files that are shown read-only at their own paths, such as toolchains outside
    /// `/usr`. They must exist.
    pub read_only: Vec<PathBuf>,
    /// Paths that are hidden even below a shown path, such as the agent's own directories. They
    /// take precedence over `read_only` and may be missing.
    pub hidden: Vec<PathBuf>,
}

/// A program to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxProgram {
    /// The program, searched in `PATH` unless it contains a slash, and its arguments.
    pub argv: Vec<String>,
    /// Variables that are added to `PATH`, `HOME`, `LANG` and `TMPDIR`, or replace them. The
    /// program receives no others.
    pub env: Vec<(String, String)>,
    /// The program's input, which it may leave unread.
    #[serde(skip)]
    pub stdin: Vec<u8>,
}

/// The limits of a program together with all processes that it starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramLimits {
    /// The wall-clock time from start to end.
    pub wall: Duration,
    /// The resident memory. Without a cgroup it is measured 50 times a second, and one process may
    /// reserve at most twice the limit.
    pub memory_bytes: u64,
    /// The number of processes and threads at once.
    pub processes: u32,
    /// The bytes that may be written to the room, which is in memory; also the largest file.
    pub disk_bytes: u64,
    /// The bytes of stdout and stderr together; the program is ended above it.
    pub output_bytes: u64,
}

impl Default for ProgramLimits {
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

/// The result of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramResult {
    pub how: ProgramEnd,
    /// The output; with `stderr` at most `output_bytes`.
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// The wall-clock time without the sandbox's own work before and after.
    pub wall: Duration,
}

/// The way in which a program ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProgramEnd {
    /// It exited with this code.
    Exited(i32),
    /// It was ended by this signal, its own or one of its processes'.
    Signalled(i32),
    /// It was ended at its wall-clock limit.
    TimedOut,
    /// It was ended because it exceeded its memory limit.
    OutOfMemory,
    /// It was ended because it exceeded its output limit.
    OutputTooLong,
    /// It could not be executed, with the reason: file missing or not executable.
    NotStarted(String),
}
