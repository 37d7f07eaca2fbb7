//! From our errors to gRPC statuses: the one place that chooses codes. The message is the
//! whole error chain, because the caller cannot see our log.

use std::error::Error;

use bus::{PresenceError, PublishError, ReadError, RequestError};
use control::{AuditError, CheckpointError, DrainError, HistoryError, RunError, SubmitError};
use store::{Fault, GetError, PathError, PutError};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};
use wire::{ErrorCode, IdError, chain};

use crate::{arguments::ArgumentError, call::CallError};

/// Percent-encoded it is up to three times as long, it stands in the details once more, and
/// clients refuse headers above 8 KiB.
const STATUS_BYTES_MAX: usize = 1536;
/// Of our reasons, in `google.rpc.ErrorInfo`.
pub(crate) const DOMAIN: &str = "flotilla";

/// An error that has a status code.
pub(crate) trait Coded: Error {
    fn code(&self) -> Code;
}

/// Any `Coded` error, as `?` makes it.
#[derive(Debug)]
pub(crate) struct Refusal(Status);

impl<E: Coded> From<E> for Refusal {
    fn from(error: E) -> Self {
        Self(refused(error.code(), chain(&error)))
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        refusal.0
    }
}

/// The status of a call that is not done. The code in its words is there for programs as well
/// (google.aip.dev/193).
pub(crate) fn refused(code: Code, words: impl Into<String>) -> Status {
    let words = bounded(words.into());
    match ErrorCode::in_text(&words) {
        None => Status::new(code, words),
        Some(reason) => {
            let info = ErrorDetails::with_error_info(reason.to_string(), DOMAIN, []);
            Status::with_error_details(code, words, info)
        }
    }
}

fn bounded(mut message: String) -> String {
    if message.len() > STATUS_BYTES_MAX {
        message.truncate(message.floor_char_boundary(STATUS_BYTES_MAX));
        message.push('…');
    }
    message
}

impl Coded for ArgumentError {
    fn code(&self) -> Code {
        Code::InvalidArgument
    }
}

impl Coded for IdError {
    fn code(&self) -> Code {
        Code::InvalidArgument
    }
}

impl Coded for PathError {
    fn code(&self) -> Code {
        Code::InvalidArgument
    }
}

impl Coded for CallError {
    fn code(&self) -> Code {
        match self {
            Self::BusAway | Self::Stopping | Self::Lost { .. } => Code::Unavailable,
            Self::Overdue { .. } | Self::Deadline => Code::DeadlineExceeded,
            Self::TooLarge { .. } | Self::TooManyStreams | Self::TooManyBoards => {
                Code::ResourceExhausted
            }
        }
    }
}

impl Coded for SubmitError {
    fn code(&self) -> Code {
        match self {
            Self::Checkpoint(CheckpointError::Read(error)) | Self::Read(error) => error.code(),
            Self::Checkpoint(CheckpointError::Get(error)) => error.code(),
            Self::Store(error) => error.code(),
            Self::Publish(error) => error.code(),
            Self::OpenStore(_) => Code::Unavailable,
            error if error.is_callers() => Code::InvalidArgument,
            _ => Code::Internal,
        }
    }
}

impl Coded for RunError {
    fn code(&self) -> Code {
        match self {
            Self::Unknown(_) => Code::NotFound,
            Self::Ended { .. } => Code::FailedPrecondition,
            Self::Busy(_) => Code::Aborted,
            Self::Read(error) => error.code(),
            Self::Publish(error) => error.code(),
        }
    }
}

impl Coded for HistoryError {
    fn code(&self) -> Code {
        match self {
            Self::Unknown(_) => Code::NotFound,
            Self::NoRun(_) => Code::InvalidArgument,
            Self::SelectsNothing(_) | Self::NotYet { .. } => Code::FailedPrecondition,
            Self::Archive { .. } | Self::Store(_) => Code::Unavailable,
            Self::Page(_) => Code::Internal,
            Self::Read(error) => error.code(),
        }
    }
}

impl Coded for AuditError {
    fn code(&self) -> Code {
        match self {
            Self::Unknown(_) => Code::NotFound,
            Self::Read(error) => error.code(),
        }
    }
}

impl Coded for CheckpointError {
    fn code(&self) -> Code {
        match self {
            Self::Reference(_) => Code::InvalidArgument,
            Self::Unknown(_) => Code::NotFound,
            Self::Read(error) => error.code(),
            Self::Get(error) => error.code(),
            Self::OpenStore(_) => Code::Unavailable,
            Self::Write { .. } => Code::Internal,
        }
    }
}

impl Coded for DrainError {
    fn code(&self) -> Code {
        match self {
            Self::Unknown(_) => Code::NotFound,
            Self::Presence(error) => error.code(),
        }
    }
}

impl Coded for PresenceError {
    fn code(&self) -> Code {
        match self {
            Self::Request { source, .. } => source.code(),
            Self::Malformed { .. } => Code::DataLoss,
            Self::NotListening { .. } | Self::Closed { .. } => Code::Unavailable,
        }
    }
}

impl Coded for ReadError {
    fn code(&self) -> Code {
        match self {
            Self::Request { source, .. } => source.code(),
            Self::NoStream { .. } => Code::Unavailable,
            Self::Unreadable { .. } => Code::DataLoss,
            Self::WentBack { .. } => Code::OutOfRange,
        }
    }
}

impl Coded for PublishError {
    fn code(&self) -> Code {
        match self {
            Self::TooLarge { .. } => Code::InvalidArgument,
            Self::Full { .. } => Code::ResourceExhausted,
            Self::Unacknowledged { .. } => Code::Unavailable,
            Self::Refused { source, .. } => source.code(),
        }
    }
}

impl Coded for RequestError {
    fn code(&self) -> Code {
        match self {
            Self::Closed => Code::Unavailable,
            error if error.is_transient() => Code::Unavailable,
            // The gateway's own credentials: nothing the caller may lack.
            Self::Denied { .. } => Code::FailedPrecondition,
            _ => Code::Internal,
        }
    }
}

impl Coded for Fault {
    fn code(&self) -> Code {
        match self {
            Self::Denied { .. } | Self::Refused { .. } => Code::FailedPrecondition,
            Self::Full { .. } => Code::ResourceExhausted,
            Self::Missing { .. } => Code::NotFound,
            Self::Failed { .. } => Code::Unavailable,
        }
    }
}

impl Coded for GetError {
    fn code(&self) -> Code {
        match self {
            Self::Fault(fault) => fault.code(),
            Self::NoSuchFile { .. } | Self::Nowhere { .. } => Code::NotFound,
            Self::Digest(_) | Self::Path(_) | Self::Corrupt { .. } | Self::Manifest { .. } => {
                Code::DataLoss
            }
            Self::TooLarge { .. } => Code::ResourceExhausted,
            Self::Cache(_) => Code::Internal,
        }
    }
}

impl Coded for PutError {
    fn code(&self) -> Code {
        match self {
            Self::Fault(fault) => fault.code(),
            Self::Occupied { .. } => Code::DataLoss,
            _ => Code::Internal,
        }
    }
}
