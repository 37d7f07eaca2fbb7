//! The hardware of a host and the treatment of its accelerator. Reads sysfs below a root that tests
//! can replace; starts no process and never wakes a suspended card.

mod built_in_profiles;
pub mod capture_file;
mod classify;
mod free_memory;
pub mod hang_detector;
pub mod host_files;
pub mod host_snapshot;
mod kernel_log;
mod known_stack;
pub mod memory_guard;
pub mod owner_policy;
mod profile;
pub mod storm;
pub mod target;
pub mod telemetry;
pub mod torch_environment;

pub use classify::{FaultEvidence, KnownFault, RetryAdvice, classify_fault};
pub use free_memory::{available_memory_bytes, peak_memory_bytes};
pub use kernel_log::KernelLog;
pub use known_stack::{KnownStack, StackVersions};
pub use profile::{
    AttentionKind, HardwareProfile, LlamaProfile, LlamaTaskProfile, ProfileError, PythonRange,
    SupportLevel, TrainingProfile,
};
