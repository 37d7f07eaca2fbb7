//! The trainer: answers train orders with checkpoints. [`TrainerRole`] runs in the agent and
//! publishes the checkpoints; [`run_train_worker`] is the process that trains, a new one for each
//! training.

mod checkpoint_schedule;
mod config;
mod last_speed;
mod lineage;
mod memory_needs;
mod messages;
mod offline;
mod publish;
mod pytorch;
mod replay;
mod reproduce;
mod role;
mod sent_weights;
mod signals;
mod torch_probe;
mod training_check;
mod training_files;
mod training_part;
mod training_process;
mod weight_delta;
mod worker;

pub use config::{TrainerConfig, TrainingEngine};
pub use offline::{OfflineCheckpoint, OfflineTraining};
pub use pytorch::{PyTorchProgram, PythonRunner};
pub use reproduce::{Reproduction, ReproductionResult};
pub use role::TrainerRole;
pub use torch_probe::fetch_packages;
pub use worker::run_train_worker;

/// Returns the settings of workers that tests do not start.
#[cfg(test)]
fn test_launcher(directory: &std::path::Path, profile: &str) -> agent::WorkerLauncher {
    let profile = hardware::HardwareProfile::load_named(profile).expect("a built-in profile");
    agent::WorkerLauncher::new("unused".into(), directory, profile)
}

/// Parsers of the worker's messages, for tests with hostile input.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::messages::fuzz_messages as calls;
}
