//! Fleets of real processes for tests: `flotilla up` in a directory of its own, on free
//! ports, ended with the test. Talks to them as a user does: by the command line.

mod files;
mod fleet;
mod wait;

pub use files::{Files, Sampling};
pub use fleet::{Fleet, Output, binary};
pub use wait::until;
