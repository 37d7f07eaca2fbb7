//! The spec of a run as a user writes it: YAML with defaults, in which every unknown key is an
//! error. [`RunSpec::parse`] reads and checks it; `to_proto` methods convert its sections to the
//! form of the `spec` fact, the first message of a run in the log. [`run_spec_schema`] describes the
//! YAML for editors. Reads no files and knows neither bus nor store.

mod across;
mod base;
mod canary;
mod chat;
mod curriculum;
mod cycle_schedule;
mod data_source;
mod document;
mod error;
mod eval_suite;
mod field_checks;
mod fork_settings;
mod gates;
mod generation;
mod heldout;
mod judge;
mod measure_draft;
mod objective;
mod promote;
mod queue;
mod raft;
mod run_draft;
mod run_spec;
mod run_spec_checks;
mod sampling;
mod schema;
mod selection;
mod sft_draft;
mod similar;
mod source_map;
mod sweep;
mod training;
mod verifier;
mod yaml;

pub use across::{AcrossSpec, MergeSpec, OuterSpec, WorkersSpec};
pub use base::{BaseSpec, InitSpec, UploadSpec};
pub use chat::ChatSpec;
pub use data_source::{FEEDBACK_PREFIX, HUB_PREFIX, names_rows};
pub use error::{FieldError, SpecError};
pub use eval_suite::{
    MeasuredSuites, PromptSuiteSettings, SuiteMeasure, SuiteSpec, TextSuiteSettings,
};
pub use fork_settings::{ForkSettingError, apply_fork_settings};
pub use generation::{
    AnswerWritingSpec, CategorySpec, DeduplicationSpec, GenerationLimits, GenerationSpec,
    HeldoutShareSpec, PromptWritingSpec, SeedExample, WritingSampling,
};
pub use heldout::{HeldoutSize, HeldoutSpec};
pub use judge::{CommandJudgeSpec, EndpointJudgeSpec, JudgeSpec};
pub use measure_draft::MeasureDraft;
pub use objective::ObjectiveSpec;
pub use promote::PromoteSpec;
pub use queue::QueueSpec;
pub use raft::RaftSpec;
pub use run_draft::{DraftBase, RunDraft};
pub use run_spec::{RunSpec, SftSpec, SweepSpec, WatchSpec};
pub use run_spec_checks::check_run_name;
pub use sampling::SamplingSpec;
pub use schema::{
    GENERATION_SCHEMA_FILE, SCHEMA_FILE, add_schema_line, generation_spec_schema, run_spec_schema,
    run_spec_schema_text, watch_spec_schema,
};
pub use selection::SelectionSpec;
pub use sft_draft::SftDraft;
pub use similar::find_similar;
pub use source_map::find_place;
pub use sweep::{SweepRun, describe_settings};
pub use training::{BaseQuantizationSpec, LoraAdapterSpec, TrainingSpec};
pub use verifier::VerifierSpec;
pub use yaml::parse_yaml;
