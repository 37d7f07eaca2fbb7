//! Converts errors to gRPC statuses: the only place that chooses codes. The message is the whole
//! error chain, because the caller cannot read the gateway's log.

use std::error::Error;

use bus::{ExchangeError, PresenceError, PublishError, ReadError, RequestError};
use control::{
    AuditError, ChannelError, CheckpointError, CompareError, DrainError, ForecastError, ForkError,
    HistoryError, LearnError, RunError, SubmitError,
};
use store::{GetError, PathError, PutError, StorageError};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};
use wire::{ErrorCode, IdError};

use crate::arguments::ArgumentError;

/// Percent-encoding makes a message up to three times longer, the details repeat it, and clients
/// reject headers above 8 KiB.
const STATUS_BYTES_MAX: usize = 1536;
/// The domain of error reasons in `google.rpc.ErrorInfo`.
pub(crate) const ERROR_DOMAIN: &str = "flotilla";

pub(crate) trait HasStatusCode: Error {
    fn status_code(&self) -> Code;
}

/// Builds a status. If the message contains an error code, the details contain it too, for programs
/// (google.aip.dev/193).
pub(crate) fn build_status(code: Code, words: impl Into<String>) -> Status {
    let words = truncate_message(words.into());
    match ErrorCode::find_in_text(&words) {
        None => Status::new(code, words),
        Some(reason) => {
            let info = ErrorDetails::with_error_info(reason.to_string(), ERROR_DOMAIN, []);
            Status::with_error_details(code, words, info)
        }
    }
}

/// Returns the name of a code in Connect's spelling.
pub(crate) fn code_name(code: Code) -> &'static str {
    match code {
        // No error has the code `Ok`.
        Code::Ok | Code::Unknown => "unknown",
        Code::Cancelled => "canceled",
        Code::InvalidArgument => "invalid_argument",
        Code::DeadlineExceeded => "deadline_exceeded",
        Code::NotFound => "not_found",
        Code::AlreadyExists => "already_exists",
        Code::PermissionDenied => "permission_denied",
        Code::ResourceExhausted => "resource_exhausted",
        Code::FailedPrecondition => "failed_precondition",
        Code::Aborted => "aborted",
        Code::OutOfRange => "out_of_range",
        Code::Unimplemented => "unimplemented",
        Code::Internal => "internal",
        Code::Unavailable => "unavailable",
        Code::DataLoss => "data_loss",
        Code::Unauthenticated => "unauthenticated",
    }
}

fn truncate_message(mut message: String) -> String {
    if message.len() > STATUS_BYTES_MAX {
        message.truncate(message.floor_char_boundary(STATUS_BYTES_MAX));
        message.push('…');
    }
    message
}

impl HasStatusCode for ArgumentError {
    fn status_code(&self) -> Code {
        Code::InvalidArgument
    }
}

impl HasStatusCode for IdError {
    fn status_code(&self) -> Code {
        Code::InvalidArgument
    }
}

impl HasStatusCode for PathError {
    fn status_code(&self) -> Code {
        Code::InvalidArgument
    }
}

impl HasStatusCode for ForkError {
    fn status_code(&self) -> Code {
        match self {
            Self::Unknown(_) => Code::NotFound,
            Self::NoCycles(_) | Self::Trial(_) | Self::NotDone { .. } => Code::FailedPrecondition,
            Self::Setting(_) | Self::Name(_) => Code::InvalidArgument,
            Self::Submit(error) => error.status_code(),
            Self::Read(error) => error.status_code(),
        }
    }
}

impl HasStatusCode for ForecastError {
    fn status_code(&self) -> Code {
        match self {
            Self::NoAgents | Self::MissingRoles(_) | Self::NoTraining(_) => {
                Code::FailedPrecondition
            }
            Self::Time(_) | Self::Past(_) | Self::Price(_) => Code::InvalidArgument,
            Self::Submit(error) => error.status_code(),
            Self::Run(error) => error.status_code(),
            Self::Presence(error) => error.status_code(),
            Self::Read(error) => error.status_code(),
        }
    }
}

impl HasStatusCode for SubmitError {
    fn status_code(&self) -> Code {
        match self {
            Self::Read(error) => error.status_code(),
            Self::Checkpoint { source, .. } => match &**source {
                error if error.is_caller_fault() => Code::InvalidArgument,
                CheckpointError::Run(error) => error.status_code(),
                CheckpointError::Get(error) => error.status_code(),
                _ => Code::InvalidArgument,
            },
            Self::Store(error) => error.status_code(),
            Self::Channel(error) => error.status_code(),
            Self::Feedback(error) => error.status_code(),
            Self::Publish(error) => error.status_code(),
            Self::Unfinished { source, .. } => source.status_code(),
            Self::Learning(_) => Code::Aborted,
            Self::OpenStore(_) => Code::Unavailable,
            error if error.is_caller_fault() => Code::InvalidArgument,
            _ => Code::Internal,
        }
    }
}

impl HasStatusCode for RunError {
    fn status_code(&self) -> Code {
        match self {
            Self::Unknown(_) | Self::NoSuite { .. } => Code::NotFound,
            Self::Ended { .. } | Self::NoSweep(_) => Code::FailedPrecondition,
            Self::Busy(_) => Code::Aborted,
            Self::Read(error) => error.status_code(),
            Self::Publish(error) => error.status_code(),
            Self::Presence(error) => error.status_code(),
        }
    }
}

impl HasStatusCode for HistoryError {
    fn status_code(&self) -> Code {
        match self {
            Self::Unknown(_) | Self::NoCycle { .. } => Code::NotFound,
            Self::NoRun(_) => Code::InvalidArgument,
            Self::SelectsNothing(_) | Self::NotYet { .. } => Code::FailedPrecondition,
            Self::Archive { .. } | Self::Store(_) => Code::Unavailable,
            Self::Page(_) => Code::Internal,
            Self::Read(error) => error.status_code(),
            Self::Run(error) => error.status_code(),
        }
    }
}

impl HasStatusCode for AuditError {
    fn status_code(&self) -> Code {
        match self {
            Self::Unknown(_) => Code::NotFound,
            Self::Run(error) => error.status_code(),
            Self::Read(error) => error.status_code(),
        }
    }
}

impl HasStatusCode for CheckpointError {
    fn status_code(&self) -> Code {
        match self {
            Self::Reference(_) | Self::Adapter { .. } => Code::InvalidArgument,
            Self::Unknown(_) => Code::NotFound,
            Self::Run(error) => error.status_code(),
            Self::Get(error) => error.status_code(),
            Self::OpenStore(_) => Code::Unavailable,
            Self::Write { .. } => Code::Internal,
        }
    }
}

impl HasStatusCode for CompareError {
    fn status_code(&self) -> Code {
        match self {
            Self::Alpha(_) => Code::InvalidArgument,
            Self::NoSamples { .. }
            | Self::NothingInCommon { .. }
            | Self::OtherSettings { .. }
            | Self::NotLast { .. } => Code::FailedPrecondition,
            Self::Checkpoint(error) => error.status_code(),
            Self::History(error) => error.status_code(),
        }
    }
}

impl HasStatusCode for ChannelError {
    fn status_code(&self) -> Code {
        match self {
            Self::Name(_) | Self::RunName(_) | Self::TwoModels | Self::NoModel(_) => {
                Code::InvalidArgument
            }
            Self::Base { .. } | Self::KeepDays(_) => Code::InvalidArgument,
            Self::Unknown(_) => Code::NotFound,
            Self::NothingBefore(_) | Self::NotBetter { .. } | Self::NotComparable(_) => {
                Code::FailedPrecondition
            }
            Self::Busy(_) | Self::Moved(_) => Code::Aborted,
            Self::Checkpoint(error) => error.status_code(),
            Self::Compare(error) => error.status_code(),
            Self::Run(error) => error.status_code(),
            Self::Read(error) => error.status_code(),
            Self::Publish(error) => error.status_code(),
            Self::Presence(error) => error.status_code(),
        }
    }
}

impl HasStatusCode for LearnError {
    fn status_code(&self) -> Code {
        match self {
            Self::Channel(error) => error.status_code(),
            Self::Submit(error) => error.status_code(),
            Self::Spec { .. } | Self::AtLeast(_) | Self::File { .. } => Code::InvalidArgument,
            Self::Exchange(error) => error.status_code(),
            Self::Put(error) => error.status_code(),
            Self::Get(error) => error.status_code(),
            Self::Store(_) => Code::Unavailable,
        }
    }
}

impl HasStatusCode for ExchangeError {
    fn status_code(&self) -> Code {
        self.request_error().status_code()
    }
}

impl HasStatusCode for DrainError {
    fn status_code(&self) -> Code {
        match self {
            Self::Unknown(_) => Code::NotFound,
            Self::Presence(error) => error.status_code(),
        }
    }
}

impl HasStatusCode for PresenceError {
    fn status_code(&self) -> Code {
        match self {
            Self::Request { source, .. } => source.status_code(),
            Self::Malformed { .. } => Code::DataLoss,
            Self::NotListening { .. } | Self::OnlyByGateway { .. } | Self::Closed { .. } => {
                Code::Unavailable
            }
        }
    }
}

impl HasStatusCode for ReadError {
    fn status_code(&self) -> Code {
        match self {
            Self::Request { source, .. } => source.status_code(),
            Self::NoStream { .. } => Code::Unavailable,
            Self::Unreadable { .. } => Code::DataLoss,
            Self::Truncated { .. } => Code::OutOfRange,
        }
    }
}

impl HasStatusCode for PublishError {
    fn status_code(&self) -> Code {
        match self {
            Self::TooLarge { .. } => Code::InvalidArgument,
            Self::Full { .. } => Code::ResourceExhausted,
            Self::Unacknowledged { .. } => Code::Unavailable,
            Self::Refused { source, .. } => source.status_code(),
        }
    }
}

impl HasStatusCode for RequestError {
    fn status_code(&self) -> Code {
        match self {
            Self::Closed => Code::Unavailable,
            error if error.is_transient() => Code::Unavailable,
            // The bus denies the gateway's own credentials; the caller lacks nothing.
            Self::Denied { .. } => Code::FailedPrecondition,
            _ => Code::Internal,
        }
    }
}

impl HasStatusCode for StorageError {
    fn status_code(&self) -> Code {
        match self {
            Self::Denied { .. } | Self::Refused { .. } => Code::FailedPrecondition,
            Self::Full { .. } => Code::ResourceExhausted,
            Self::Missing { .. } => Code::NotFound,
            Self::Failed { .. } => Code::Unavailable,
        }
    }
}

impl HasStatusCode for GetError {
    fn status_code(&self) -> Code {
        match self {
            Self::Storage(fault) => fault.status_code(),
            Self::NoSuchFile { .. } | Self::Unavailable { .. } | Self::Removed { .. } => {
                Code::NotFound
            }
            Self::Digest(_) | Self::Path(_) | Self::Corrupt { .. } | Self::Manifest { .. } => {
                Code::DataLoss
            }
            Self::TooLarge { .. } => Code::ResourceExhausted,
            Self::Cache(_) => Code::Internal,
        }
    }
}

impl HasStatusCode for PutError {
    fn status_code(&self) -> Code {
        match self {
            Self::Storage(fault) => fault.status_code(),
            Self::Occupied { .. } => Code::DataLoss,
            _ => Code::Internal,
        }
    }
}
