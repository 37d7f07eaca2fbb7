//! The files a run is given: read whatever way they are written, conversations written out by the
//! base's chat template, split, compared and told of before anything is stored.

mod chat;
mod error;
mod examples;
mod files;
mod model;
mod prepare;
mod prompts;
mod room;
mod split;
mod statistics;

pub use self::{
    error::DataError,
    files::{dedup, file_report, split_file},
    split::Held,
};
pub(crate) use self::{
    error::ModelError,
    prepare::{Prepared, PreparedKind, PreparedSuite, Reader},
};
