//! The error of operations with keys.

use std::path::PathBuf;

use crate::{CertificateError, ClaimsError, KeyFileError};

/// The reason why keys could not be read, created or used.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error(transparent)]
    File(#[from] KeyFileError),
    #[error("{} is not a key (K110)", path.display())]
    Key {
        path: PathBuf,
        #[source]
        source: nkeys::error::Error,
    },
    #[error("make a key (K110)")]
    Make(#[source] nkeys::error::Error),
    #[error("{} does not describe a fleet's keys (K110)", path.display())]
    Metadata {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("{} is of version {found}; this program knows {known}: upgrade it (K110)", path.display())]
    Newer { path: PathBuf, found: u32, known: u32 },
    #[error("{} belongs to an unfinished `flotilla init`; remove that directory and try again (K110)", path.display())]
    Unfinished { path: PathBuf },
    #[error("a nats-server cannot have the path {}: choose one in UTF-8 without quotes (K110)", path.display())]
    Path { path: PathBuf },
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    #[error(transparent)]
    Claims(#[from] ClaimsError),
}
