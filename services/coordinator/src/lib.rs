//! The shell around `cycle`: replays the log, follows it, and writes what the core decides.
//!
//! There is no other state. Any peer may run it, and all of them may: the leader lease
//! only saves repeated effort.

mod archive;
mod figures;
mod fleet;
mod prompts;
mod shell;

pub use archive::Keep;
pub use figures::{Figures, RunFigures, Samples};
pub use shell::{Config, Turn, run};
