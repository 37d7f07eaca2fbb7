//! The burn-in of a box: it trains, publishes, converts, serves, compares GPU and CPU, and evaluates
//! on its real hardware within minutes, and reports each stage with measurements.
//!
//! - `burn_in` runs the stages in `stages`, each in worker processes as an agent starts them.
//! - `stage_runner` limits, times and records a stage; one that fails does not stop the others.
//! - `engines` finds the llama.cpp and the device that a box works with, `training_engine` what it
//!   trains with.
//! - `report` and `redaction` make the file for bug reports; both are pure.
//! - `task` has the texts and settings; `telemetry_log` samples the host meanwhile.

mod burn_in;
mod engines;
mod redaction;
mod report;
mod settings;
mod stage_runner;
mod stages;
mod task;
mod telemetry_log;
mod training_engine;

pub use burn_in::run_burn_in;
pub use redaction::PrivateNames;
pub use report::{BurnInReport, STAGE_HEADINGS, StageOutcome, StageReport};
pub use settings::BurnInSettings;
pub use telemetry_log::StageTelemetry;
pub use training_engine::choose_engine;

/// Returns the settings of workers that cannot start.
#[cfg(test)]
fn test_launcher(directory: &std::path::Path, profile: &str) -> agent::WorkerLauncher {
    let profile = hardware::HardwareProfile::load_named(profile).expect("a built-in profile");
    agent::WorkerLauncher::new(directory.join("no-program"), directory, profile)
}
