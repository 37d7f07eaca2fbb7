//! What every agent does, whatever its roles: say it is there, pull work, hold the
//! lease while a child process does it, write the result, acknowledge, and drain.
//!
//! A role (trainer, generator, verifier, evaluator) says which facts call for its work
//! and how a worker process does it; this crate knows neither models nor verifiers.

mod agent;
mod ahead;
mod child;
mod doctor;
mod exchange;
mod failure;
mod figures;
mod herd;
mod job;
mod keep;
mod launch;
mod legacy;
mod patience;
mod placing;
mod presence;
mod protocol;
mod role;
mod runs;
mod side;
pub mod watch;
mod work;
mod worker;

pub use agent::{Agent, Config};
pub use ahead::Ahead;
pub use child::{Child, Command};
pub use conduct::{Fault, Pace, Room, halved};
pub use doctor::Doctor;
pub use exchange::Exchange;
pub use herd::Herd;
pub use job::{Job, JobError};
pub use launch::Launch;
pub use patience::Patience;
pub use placing::Needs;
#[doc(hidden)]
pub use protocol::fuzzing;
pub use protocol::{Call, Inbox, Responder};
pub use role::Role;
pub use side::{Account, Side};
pub use worker::{Worker, WorkerError};
