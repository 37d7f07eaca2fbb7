//! The errors of calls: those that do not depend on the service, and the refusal that every error of
//! a service becomes.

use std::time::Duration;

use tonic::{Code, Status};
use wire::format_error_chain;

use crate::{
    member_limit::LimitReached,
    status::{HasStatusCode, build_status},
};

/// The default limit of gRPC clients, minus 1 KiB for the envelope.
pub(crate) const ANSWER_BYTES_MAX: usize = (4 << 20) - 1024;

/// A failure of a call that does not depend on the service.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error(
        "the gateway has no NATS connection; check that nats-server is running and reachable from it (G105)"
    )]
    BusUnreachable,
    #[error("not finished within {limit:?}; check the result before calling again (G102)")]
    TimedOut { limit: Duration },
    #[error(
        "the answer has {bytes} bytes, the limit is {ANSWER_BYTES_MAX}; name a run or a suite, or \
         use the service's Watch (G103)"
    )]
    TooLarge { bytes: usize },
    #[error(transparent)]
    TooManyStreams(#[from] LimitReached),
    #[error("too many runs are being watched; close a page, or try again in a minute (G104)")]
    TooManyViews,
    #[error("the view is no longer updated ({why}); open it again (G105)")]
    ViewLost { why: String },
    #[error(
        "nothing of the stream was read for {limit:?}; open it again, a watch after its last cursor \
         (G105)"
    )]
    ReaderStalled { limit: Duration },
    #[error("the call's own deadline has passed (G102)")]
    DeadlinePassed,
    #[error("the gateway is stopping; reconnect later and continue from the last cursor (G105)")]
    Stopping,
}

impl HasStatusCode for CallError {
    fn status_code(&self) -> Code {
        match self {
            Self::BusUnreachable
            | Self::Stopping
            | Self::ViewLost { .. }
            | Self::ReaderStalled { .. } => Code::Unavailable,
            Self::TimedOut { .. } | Self::DeadlinePassed => Code::DeadlineExceeded,
            Self::TooLarge { .. } | Self::TooManyStreams(_) | Self::TooManyViews => {
                Code::ResourceExhausted
            }
        }
    }
}

/// The status of a failed call; `?` converts any error with a status code to it.
#[derive(Debug)]
pub(crate) struct CallRefusal(Status);

impl<E: HasStatusCode> From<E> for CallRefusal {
    fn from(error: E) -> Self {
        Self(build_status(error.status_code(), format_error_chain(&error)))
    }
}

impl From<CallRefusal> for Status {
    fn from(refusal: CallRefusal) -> Self {
        refusal.0
    }
}
