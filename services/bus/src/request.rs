//! Sends one request to the server and classifies every failure: a denied permission is not
//! reported as a timeout, and an answer lost with the connection is noticed on reconnect.

use std::time::Duration;

use async_nats::{HeaderMap, Message, Request, RequestErrorKind};
use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::Bus;

/// Time limit for an answer: enough for a disk sync on a busy disk, or a cluster that forwards to
/// its leader. A lost connection is noticed sooner.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Error codes of the server that this crate handles (nats-server `errors.json`).
pub(crate) mod code {
    pub(crate) const CLUSTER_NOT_AVAILABLE: u64 = 10008;
    pub(crate) const CONSUMER_NOT_FOUND: u64 = 10014;
    pub(crate) const NO_MESSAGE: u64 = 10037;
    pub(crate) const STREAM_EXISTS: u64 = 10058;
    pub(crate) const STREAM_NOT_FOUND: u64 = 10059;
    pub(crate) const WRONG_LAST_SEQUENCE: u64 = 10071;
    pub(crate) const STORE_FULL: [u64; 4] = [10002, 10023, 10047, 10077];
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

    /// Returns true if the server refused with this error code.
    pub(crate) fn has_server_code(&self, wanted: u64) -> bool {
        matches!(self, Self::Refused { error, .. } if *error == wanted)
    }
}

/// An answer of the JetStream API: an error, or the fields of `T`.
#[derive(Deserialize)]
#[serde(untagged)]
enum ApiAnswer<T> {
    Error { error: ApiError },
    Value(T),
}

/// The error part of an answer.
#[derive(Deserialize)]
struct ApiError {
    #[serde(default)]
    code: u64,
    #[serde(default)]
    err_code: u64,
    #[serde(default)]
    description: String,
}

impl Bus {
    /// Sends a request of the JetStream API, `$JS.API.<verb>`, and parses the answer.
    pub(crate) async fn call_api<T: DeserializeOwned>(
        &self,
        verb: &str,
        body: &impl Serialize,
    ) -> Result<T, RequestError> {
        let body = serde_json::to_vec(body)
            .map_err(|error| RequestError::Malformed { detail: error.to_string() })?;
        let subject = format!("$JS.API.{verb}");
        let message =
            self.send_request(subject, HeaderMap::new(), body.into(), ANSWER_LIMIT).await?;
        parse_answer(&message)
    }

    /// Sends a request and returns the raw answer. Waits for the connection first, within the
    /// limit.
    ///
    /// Dropping the future leaks nothing, but the request may have been sent.
    pub(crate) async fn send_request(
        &self,
        subject: String,
        headers: HeaderMap,
        payload: Bytes,
        limit: Duration,
    ) -> Result<Message, RequestError> {
        let connection = &self.shared.connection;
        connection.wait_connected(limit).await?;
        let mut violations = connection.violations.subscribe();
        let mut generation = connection.generation.subscribe();
        generation.borrow_and_update();
        let request = Request::new().payload(payload).headers(headers).timeout(Some(limit));
        let answers = format!("\"{}.", self.shared.inbox_prefix);
        let answer = self.shared.client.send_request(subject.clone(), request);
        tokio::pin!(answer);
        loop {
            tokio::select! {
                answer = &mut answer => return answer.map_err(|error| match error.kind() {
                    RequestErrorKind::TimedOut => RequestError::TimedOut { limit },
                    RequestErrorKind::NoResponders => {
                        RequestError::NoResponders { subject: subject.clone() }
                    }
                    RequestErrorKind::Other => RequestError::Closed,
                    _ => RequestError::Malformed { detail: error.to_string() },
                }),
                Ok(violation) = violations.recv() => {
                    let ours = violation.contains(&format!("\"{subject}\""));
                    if ours || violation.contains(&answers) {
                        return Err(RequestError::Denied { violation });
                    }
                }
                changed = generation.changed() => {
                    return Err(match changed {
                        Ok(()) => RequestError::Interrupted,
                        Err(_) => RequestError::Closed,
                    });
                }
            }
        }
    }
}

/// Parses an answer of the JetStream API; an error in it becomes `Refused`.
pub(crate) fn parse_answer<T: DeserializeOwned>(message: &Message) -> Result<T, RequestError> {
    match serde_json::from_slice(&message.payload) {
        Ok(ApiAnswer::Value(value)) => Ok(value),
        Ok(ApiAnswer::Error { error }) => Err(RequestError::Refused {
            code: error.code,
            error: error.err_code,
            description: error.description,
        }),
        Err(error) => Err(RequestError::Malformed { detail: error.to_string() }),
    }
}
