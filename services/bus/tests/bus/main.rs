//! The bus against real servers: each test has its own, on its own directory and port.

#![allow(clippy::unwrap_used, reason = "tests")]

mod batches;
mod closed;
mod exchanges;
mod leader;
mod limits;
mod log;
mod managed;
mod presence;
mod refusals;
mod rig;
mod work;
