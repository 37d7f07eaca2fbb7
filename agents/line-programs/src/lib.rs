//! Programs that keep running and answer requests: each request and each answer is one line with
//! one JSON object. The request has a number in its field `id`, and the answer repeats it; answers
//! may come in another order than their requests.
//!
//! [`LineProgram`] is one process. [`LineProgramPool`] keeps several, starts them when they are
//! needed, replaces those that ended, and ends those that are idle. A [`ProgramLauncher`] decides
//! where and how a process runs.
//!
//! Everything that a program writes is bounded. A program that hangs, writes too much, or answers
//! what it was not asked is ended; its requests fail with a [`LineProgramError`]. This crate
//! does not interpret requests and answers.

mod answer_lines;
mod backoff;
mod bounds;
mod error;
mod launch;
mod pool;
mod program;
mod program_task;
mod unsent_lines;

pub use bounds::LineBounds;
pub use error::{LineFailure, LineProgramError};
pub use launch::{CommandLauncher, LaunchedProgram, ProgramLauncher};
pub use pool::{LeasedProgram, LineProgramPool, PoolSettings};
pub use program::LineProgram;

#[doc(hidden)]
pub mod fuzzing {
    use crate::answer_lines::{AnswerLines, parse_answer};

    /// Cuts the output of a program into lines and parses each as an answer.
    pub fn fuzz_lines(output: &[u8]) {
        let mut lines = AnswerLines::new(1000);
        for part in output.chunks(7) {
            lines.push_bytes(part);
            while let Ok(Some(line)) = lines.take_line() {
                // Only panics matter.
                let _ = parse_answer(&line);
            }
        }
    }
}
