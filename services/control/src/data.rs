//! The files that a run is given: prompts, examples and texts. They are parsed in all supported
//! forms, conversations are rendered with the base's chat template, and the prompts are split and
//! compared, all before anything is stored.

mod chat;
mod error;
mod examples;
mod heldout_split;
mod model_dir;
mod offline;
mod prepare;
mod prompts;
mod statistics;
mod token_counts;

pub(crate) use self::{
    error::BaseFilesError,
    prepare::{DataReader, PreparedKind, PreparedRun, PreparedSuite},
};
pub use self::{
    error::DataError,
    offline::{remove_duplicate_prompts, report_data_file, split_prompt_file},
};
