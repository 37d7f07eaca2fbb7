//! The files that a run is given: parsed in all supported forms, conversations rendered with the
//! base's chat template, prompts split and compared, all before anything is stored.

mod chat;
mod error;
mod examples;
mod file_content;
mod heldout_split;
mod model_dir;
mod offline;
mod prepare;
mod prompts;
mod statistics;
mod token_counts;

pub(crate) use self::{
    error::BaseFilesError,
    model_dir::stage_init_files,
    prepare::{DataReader, PreparedKind, PreparedRun, PreparedSuite},
};
pub use self::{
    error::DataError,
    offline::{remove_duplicate_prompts, report_data_file, split_prompt_file},
};
