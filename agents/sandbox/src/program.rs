//! The interface of a sandbox: a program, its limits and its result.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

/// The host's paths that programs see in addition to the system directories.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathVisibility {
    /// Directories or files, such as toolchains outside `/usr`, at their own paths. They must
    /// exist.
    pub read_only: Vec<PathBuf>,
    /// Paths that are hidden even below a shown path and may be missing; they override `read_only`.
    pub hidden: Vec<PathBuf>,
}

/// A program to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxProgram {
    /// Searched in `PATH` unless it contains a slash.
    pub argv: Vec<String>,
    /// Added to `PATH`, `HOME`, `LANG` and `TMPDIR`, or replacing them. The program gets no others.
    pub env: Vec<(String, String)>,
    /// May be left unread.
    #[serde(skip)]
    pub stdin: Vec<u8>,
}

/// The limits of a program together with all processes that it starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramLimits {
    /// From start to end.
    pub wall: Duration,
    /// Resident. Without a cgroup it is measured 50 times a second, and one process may reserve at
    /// most twice the limit.
    pub memory_bytes: u64,
    /// Including threads, at once.
    pub processes: u32,
    /// Bytes in the room, which is in memory; also the largest file.
    pub disk_bytes: u64,
    /// Stdout and stderr together; the program is ended above it.
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
    /// With `stderr` at most `output_bytes`.
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// Without the sandbox's own work before and after.
    pub wall: Duration,
}

/// The way in which a program ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProgramEnd {
    Exited(i32),
    /// By this signal, its own or one of its processes'.
    Signalled(i32),
    TimedOut,
    OutOfMemory,
    OutputTooLong,
    /// The reason: file missing or not executable.
    NotStarted(String),
}
