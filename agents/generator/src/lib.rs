//! The generator: reacts to generate orders by writing samples.
//!
//! [`GeneratorRole`] runs in the agent; [`work`] is the worker process it keeps warm.

mod backend;
mod calls;
mod once;
mod rate;
mod role;
mod worker;

pub use backend::{Backend, BaseDtype, Choice, Endpoint, Limits, LlamaCpp, Places, Wanted};
pub use once::{Made, Once, generate_once};
pub use role::{Config, GeneratorRole};
pub use worker::{WorkerConfig, work};

#[doc(hidden)]
pub mod fuzzing {
    pub use crate::calls::fuzz as calls;
}
