//! The trainer: reacts to train orders by publishing checkpoints.
//!
//! [`TrainerRole`] runs in the agent and publishes; [`work`] is the process that trains,
//! a fresh one for each order.

mod calls;
mod lineage;
mod publish;
mod role;
mod worker;

pub use role::TrainerRole;
pub use worker::work;

#[doc(hidden)]
pub mod fuzzing {
    pub use crate::calls::fuzz as calls;
}
