//! What kind of box this is, and how its accelerator wants to be treated. Reads sysfs below a
//! root that tests can replace; starts nothing, and never wakes a card that sleeps.

pub mod citizen;
mod classify;
pub mod doctor;
pub mod estimate;
pub mod files;
pub mod floor;
pub mod hang;
mod kernel_log;
mod profile;
pub mod snapshot;
pub mod storm;
mod target;
pub mod telemetry;
pub mod torch;

pub use classify::{Evidence, Known, Retry, classify};
pub use kernel_log::KernelLog;
pub use profile::{
    Attention, Dtype, Llama, LlamaUse, Profile, ProfileError, PythonRange, Training,
};
