//! The reasons why a request to the server fails, and which of them are transient.

use std::time::Duration;

/// Error codes of nats-server's `errors.json`.
pub(crate) mod code {
    pub(crate) const CLUSTER_NOT_AVAILABLE: u64 = 10008;
    pub(crate) const CONSUMER_NOT_FOUND: u64 = 10014;
    pub(crate) const NO_MESSAGE: u64 = 10037;
    pub(crate) const STREAM_EXISTS: u64 = 10058;
    pub(crate) const STREAM_NOT_FOUND: u64 = 10059;
    pub(crate) const WRONG_LAST_SEQUENCE: u64 = 10071;
    pub(crate) const STORE_FULL: [u64; 4] = [10002, 10023, 10047, 10077];
    /// More messages wait for the disk than the server holds.
    pub(crate) const TOO_MANY_REQUESTS: u64 = 10167;
    /// A message with the same id is being replicated.
    pub(crate) const DUPLICATE_IN_PROCESS: u64 = 10158;
    /// Another write to the subject with an expected sequence is being replicated.
    pub(crate) const SEQUENCE_IN_PROCESS: u64 = 10164;
}

/// The reason why a request got no usable answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    #[error(
        "no answer within {limit:?}; is the nats-server overloaded, frozen or without quorum? (B104)"
    )]
    TimedOut { limit: Duration },
    #[error("not connected to a nats-server for {limit:?}; is it running and reachable? (B102)")]
    Disconnected { limit: Duration },
    #[error("the connection broke before the answer came (B104)")]
    Interrupted,
    #[error(
        "no response on {subject}: JetStream is starting, has no leader, or lost the stream (B104)"
    )]
    NoResponders { subject: String },
    #[error("the server denied it ({violation}); give these credentials that permission (B108)")]
    Denied { violation: String },
    #[error("the server refused: {description} (code {code}, error {error}) (B109)")]
    Refused { code: u64, error: u64, description: String },
    #[error("the answer was not understood: {detail} (B109)")]
    Malformed { detail: String },
    #[error("entry {sequence} stands there already and is not a fact we understand (B113)")]
    Occupied { sequence: u64 },
    #[error("the connection was closed for good (B102)")]
    Closed,
}

impl RequestError {
    /// Returns true if the same request may succeed a little later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::TimedOut { .. }
            | Self::Disconnected { .. }
            | Self::Interrupted
            | Self::NoResponders { .. } => true,
            Self::Refused { code, error, .. } => {
                *code == 503
                    || [
                        code::CLUSTER_NOT_AVAILABLE,
                        code::TOO_MANY_REQUESTS,
                        code::DUPLICATE_IN_PROCESS,
                        code::SEQUENCE_IN_PROCESS,
                    ]
                    .contains(error)
            }
            Self::Denied { .. } | Self::Malformed { .. } | Self::Occupied { .. } | Self::Closed => {
                false
            }
        }
    }

    pub(crate) fn has_server_code(&self, wanted: u64) -> bool {
        matches!(self, Self::Refused { error, .. } if *error == wanted)
    }
}
