//! The bounds of programs that keep running.

use std::time::Duration;

/// The bounds of a program's lines and times.
#[derive(Debug, Clone, Copy)]
pub struct LineBounds {
    /// Maximum bytes of a request's line.
    pub request_bytes_max: usize,
    /// Maximum bytes of an answer's line. A process that writes a longer one is ended.
    pub answer_bytes_max: usize,
    /// Bytes from the end of stderr that an error quotes; the rest is dropped.
    pub stderr_bytes_max: usize,
    /// Time that the first answer of a process may take in addition, for imports and models.
    pub start_timeout: Duration,
    /// Time between the end of its stdin and the moment when a process is killed.
    pub stop_timeout: Duration,
}

impl Default for LineBounds {
    fn default() -> Self {
        Self {
            request_bytes_max: 16 << 20,
            answer_bytes_max: 64 << 10,
            stderr_bytes_max: 1000,
            start_timeout: Duration::from_secs(60),
            stop_timeout: Duration::from_secs(2),
        }
    }
}
