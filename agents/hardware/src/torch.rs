//! The check of a Python environment's torch, read from its files without importing it: most
//! problems between ROCm and torch are visible before a program runs, and hard to diagnose
//! afterwards.

mod torch_checks;
mod torch_environment;

pub(crate) use torch_checks::check_torch_stack;

pub use crate::doctor::{DoctorFinding, Severity};
pub use torch_checks::check_torch_environment;
pub use torch_environment::{
    TorchBuild, TorchEnvironment, installed_torch_version, torch_version_file,
};
