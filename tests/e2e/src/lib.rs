//! Fleets of real processes for tests: `flotilla up` in a directory of its own, on free
//! ports, ended with the test. Talks to them as a user does: by the command line.

mod command;
mod files;
mod fleet;
mod nats;
mod processes;
mod python;
mod wait;

pub use command::{Output, binary, flotilla};
pub use files::{Files, Sampling};
pub use fleet::Fleet;
pub use nats::NatsServer;
pub use processes::Process;
pub use python::Python;
pub use wait::until;
