//! The gateway as its clients see it: over TCP, with a real nats-server and a real store.

#![allow(clippy::unwrap_used, reason = "tests")]

mod audit;
mod closed;
mod fork;
mod json;
mod login;
mod rig;
mod runs;
mod server;
mod streams;
