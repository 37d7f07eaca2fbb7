//! What a user can ask of a fleet: submit and steer runs, read evals, checkpoints and
//! agents. Works over the bus and the store alone, so the gRPC gateway and the command
//! line offer the same things with the same checks; knows neither gRPC nor terminals.

mod agents;
mod check;
mod checkpoints;
mod evals;
mod files;
mod runs;
mod spec;
mod submit;

use bus::Bus;
use store::Store;

pub use agents::DrainError;
pub use check::FieldError;
pub use checkpoints::{CheckpointError, parse_checkpoint_ref};
pub use files::{FileError, Files};
pub use runs::{RunError, timestamp, view};
pub use spec::RunSpec;
pub use submit::SubmitError;

/// A fleet, seen from outside.
#[derive(Clone)]
pub struct Control {
    bus: Bus,
    store: Store,
}

impl Control {
    pub fn new(bus: Bus, store: Store) -> Self {
        Self { bus, store }
    }

    pub fn bus(&self) -> &Bus {
        &self.bus
    }

    pub fn store(&self) -> &Store {
        &self.store
    }
}
