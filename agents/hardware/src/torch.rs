//! Whether a Python environment's torch fits the box, read from its files without importing it:
//! most of what goes wrong between ROCm and torch can be seen before anything runs, and is hard
//! to tell afterwards.

mod examine;
mod snapshot;

pub(crate) use examine::of_stack;

pub use crate::doctor::{Finding, Severity};
pub use examine::examine;
pub use snapshot::{Snapshot, Torch, installed_version, version_file};
