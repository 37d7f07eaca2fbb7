//! The reasons why a file of a spec cannot be used.

use std::{io, path::PathBuf};

use chat_template::{ChatError, TemplateError};
use data_files::DataFileError;
use hub::{DatasetError, DatasetNameError};
use store::GetError;
use wire::EncodingError;

use super::{examples::ExampleError, heldout_split::SplitError, prompts::PromptLineError};
use crate::spec_files::SpecFileError;

/// The reason why a file of a spec cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error(transparent)]
    Source(#[from] SpecFileError),
    #[error("{file}")]
    Rows {
        file: String,
        #[source]
        source: DataFileError,
    },
    #[error("{file}")]
    Hub {
        file: String,
        #[source]
        source: Box<HubDataError>,
    },
    #[error("{file}")]
    Prompts {
        file: String,
        #[source]
        source: PromptLineError,
    },
    #[error("{file}")]
    Examples {
        file: String,
        #[source]
        source: ExampleError,
    },
    #[error("{file}")]
    Encoding {
        file: String,
        #[source]
        source: EncodingError,
    },
    #[error("{file} is empty (D102)")]
    Empty { file: String },
    #[error(
        "{file}: no prompt has {missing}, which the verifier needs; add it, or choose another \
         verifier (D110)"
    )]
    NoField { file: String, missing: String },
    #[error("{file} has conversations in it")]
    Template {
        file: String,
        #[source]
        source: TemplateError,
    },
    #[error("{file} has conversations in it")]
    Chat {
        file: String,
        #[source]
        source: ChatError,
    },
    #[error(
        "{file}: an environment writes its observations in one form, but only some of the run's \
         prompts are conversations; write all as conversations or none, or set `chat: true` (D107)"
    )]
    MixedPrompts { file: String },
    #[error("{file}")]
    Split {
        file: String,
        #[source]
        source: SplitError,
    },
    #[error(
        "{file}: {count} prompts are also trained on, so their pass rate would not measure new \
         prompts: {lines}; take them out of one of the files, or write raft.allow_overlap: true \
         (D108)"
    )]
    Overlap { file: String, count: usize, lines: String },
}

/// The reason why the base's small files cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum BaseFilesError {
    #[error("the base's files are not in the store; name the model itself in base.model (R110)")]
    Elsewhere,
    #[error("read the base in the store")]
    Get(#[from] GetError),
    #[error("stage the base's small files")]
    Stage(#[source] io::Error),
}

/// The reason why a data set of the hub cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HubDataError {
    #[error(transparent)]
    Name(#[from] DatasetNameError),
    #[error(transparent)]
    Dataset(#[from] DatasetError),
    #[error("read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{file}")]
    File {
        file: String,
        #[source]
        source: DataFileError,
    },
    #[error("its files together")]
    Join(#[source] DataFileError),
}
