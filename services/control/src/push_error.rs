//! The reasons why a checkpoint was not pushed to the hub.

use std::{io, path::PathBuf};

use hub::HubError;

use crate::{CheckpointError, HistoryError, RunError};

/// The reason why a checkpoint was not pushed to the hub, or has no card.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    History(#[from] HistoryError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Hub(#[from] HubError),
    #[error("read or write {path}")]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}
