//! The generator: reacts to generate orders by writing samples.
//!
//! [`GeneratorRole`] runs in the agent; [`work`] is the worker process it keeps warm as
//! long as the policy stays the same.

mod calls;
mod rate;
mod role;
mod worker;

pub use role::{Config, GeneratorRole};
pub use worker::{WorkerConfig, work};

#[doc(hidden)]
pub mod fuzzing {
    pub use crate::calls::fuzz as calls;
}
