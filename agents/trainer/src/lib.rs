//! The trainer: reacts to train orders by publishing checkpoints.
//!
//! [`TrainerRole`] runs in the agent and publishes; [`work`] is the process that trains,
//! a fresh one for each order.

mod again;
mod cadence;
mod calls;
mod change;
mod config;
mod examine;
mod fetch;
mod lineage;
mod probe;
mod publish;
mod pytorch;
mod replay;
mod role;
mod room;
mod worker;

pub use again::{Again, Reproduced};
pub use config::{Config, Engine};
pub use pytorch::{PyTorch, Python};
pub use role::TrainerRole;
pub use room::shape;
pub use worker::work;

#[doc(hidden)]
pub mod fuzzing {
    pub use crate::calls::fuzz as calls;
}
