//! Imports configurations of other training programs as run specs, with a note on each key.
//!
//! One table per program has for each key the setting of a spec that it becomes, or the reason why
//! it has no effect. The other modules know no program: they read the keys by such a table
//! and build the spec from the settings. No file is read but through [`ImportOptions::read_file`].

mod data_files;
mod data_source;
mod eval_data;
mod flat_config;
mod import;
mod import_options;
mod key_rules;
mod objective_section;
mod program;
mod raft_section;
mod report;
mod selection_section;
mod setting;
mod settings;
mod spec_draft;
mod spec_tree;
mod tables;
mod task;
mod training_section;
mod verifier_section;

pub use import::import_config;
pub use import_options::ImportOptions;
pub use program::SourceProgram;
pub use report::{ImportError, ImportNote, ImportedSpec, KeyStatus, MissingField};
pub use task::TrainingTask;
