//! The files that a run is given: parsed in all supported forms, conversations rendered with the
//! base's chat template, prompts split and compared, all before anything is stored.

mod chat;
mod error;
mod examples;
mod file_content;
mod file_rows;
mod heldout_split;
mod hub_data;
mod model_dir;
mod offline;
mod prepare;
mod preview;
mod prompts;
mod statistics;
mod token_counts;

pub(crate) use self::{
    error::BaseFilesError,
    file_content::read_spec_file,
    hub_data::fetch_hub_data,
    model_dir::stage_init_files,
    prepare::{DataReader, PreparedKind, PreparedRun, PreparedSuite},
};
pub use self::{
    error::{DataError, HubDataError},
    offline::{
        NamedRows, check_example_file, prepare_documents, read_prompt_entries,
        remove_duplicate_prompts, report_rows, split_prompt_rows,
    },
    preview::{DataPreview, DataPreviewError, PreviewRow, PreviewSettings, preview_rows},
};
