//! The spec of a run as a user writes it: YAML with defaults, in which every unknown key is an
//! error. [`RunSpec::parse`] reads and checks it; `to_proto` methods convert its sections to the
//! form of the `spec` fact, the first message of a run in the log. Reads no files and knows neither
//! bus nor store.

mod across;
mod base;
mod canary;
mod chat;
mod curriculum;
mod cycle_schedule;
mod error;
mod eval_suite;
mod field_checks;
mod gates;
mod halo_forge;
mod heldout;
mod objective;
mod raft;
mod run_draft;
mod run_spec;
mod run_spec_checks;
mod sampling;
mod selection;
mod similar;
mod source_map;
mod training;
mod verifier;
mod yaml;

pub use across::{AcrossSpec, MergeSpec, OuterSpec, WorkersSpec};
pub use base::{BaseSpec, InitSpec, UploadSpec};
pub use chat::ChatSpec;
pub use error::{FieldError, SpecError};
pub use eval_suite::{
    MeasuredSuites, PromptSuiteSettings, SuiteMeasure, SuiteSpec, TextSuiteSettings,
};
pub use halo_forge::{ImportError, ImportNote, ImportedSpec, KeyStatus, import_halo_forge};
pub use heldout::{HeldoutSize, HeldoutSpec};
pub use objective::ObjectiveSpec;
pub use raft::RaftSpec;
pub use run_draft::{DraftBase, RunDraft};
pub use run_spec::{RunSpec, SftSpec, WatchSpec};
pub use run_spec_checks::check_run_name;
pub use sampling::SamplingSpec;
pub use selection::SelectionSpec;
pub use similar::find_similar;
pub use source_map::find_line;
pub use training::{LoraAdapterSpec, TrainingSpec};
pub use verifier::VerifierSpec;
pub use yaml::parse_yaml;
