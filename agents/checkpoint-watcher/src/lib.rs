//! Watches a directory in which a training without knowledge of Flotilla saves checkpoints, and
//! publishes each checkpoint as soon as it is complete.
//!
//! - `readiness` decides if a directory is complete.
//! - `checkpoint_scanner` links complete checkpoints into a staging directory before the
//!   trainer removes them.
//! - `publisher` publishes staged checkpoints.
//!
//! The crate does not depend on the trainer's program or method.

mod base_model;
mod checkpoint_files;
mod checkpoint_scanner;
mod directory_events;
mod file_probes;
mod publisher;
mod readiness;
mod safetensors_header;
mod staging;
mod trainer_state;

pub use checkpoint_files::CheckpointContent;
pub use checkpoint_scanner::{CheckpointScanner, QuietSettings, WatchRecord};
pub use publisher::{BeginRun, Config, NewRunInfo, watch_checkpoints};
pub use readiness::parse_step;
pub use staging::StagedCheckpoint;
pub use trainer_state::{TrainerState, TrainingFigures};
