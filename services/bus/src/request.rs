//! One request to the server and its answer, with every way it can fail told apart:
//! a denied permission is reported as such, not as a timeout, and an answer lost to
//! a broken connection is noticed when the connection is back.

use std::time::Duration;

use async_nats::{HeaderMap, Message, Request, RequestErrorKind};
use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::Bus;

/// How long the server may take to answer: an fsync on a busy disk, or a cluster
/// that forwards to its leader. Losing the connection is noticed sooner.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Server error codes this crate acts on (nats-server `errors.json`).
pub(crate) mod code {
    pub(crate) const CLUSTER_NOT_AVAILABLE: u64 = 10008;
    pub(crate) const CONSUMER_NOT_FOUND: u64 = 10014;
    pub(crate) const NO_MESSAGE: u64 = 10037;
    pub(crate) const STREAM_EXISTS: u64 = 10058;
    pub(crate) const STREAM_NOT_FOUND: u64 = 10059;
    pub(crate) const WRONG_LAST_SEQUENCE: u64 = 10071;
    pub(crate) const STORE_FULL: [u64; 4] = [10002, 10023, 10047, 10077];
    pub(crate) const DUPLICATE_IN_PROCESS: u64 = 10158;
    /// The same, for expected sequences: another write to the subject is being replicated.
    pub(crate) const SEQUENCE_IN_PROCESS: u64 = 10164;
}

/// Why a request got no usable answer.
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
        "nobody answers {subject}: JetStream is starting, has no leader, or lost the stream (B104)"
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
    /// The same request may succeed a little later.
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

    pub(crate) fn is_code(&self, wanted: u64) -> bool {
        matches!(self, Self::Refused { error, .. } if *error == wanted)
    }
}

/// What the JetStream API answers: an error, or the fields of `T`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Answer<T> {
    Error { error: ServerError },
    Value(T),
}

#[derive(Deserialize)]
struct ServerError {
    #[serde(default)]
    code: u64,
    #[serde(default)]
    err_code: u64,
    #[serde(default)]
    description: String,
}

impl Bus {
    /// A request of the JetStream API: `$JS.API.<verb>`.
    pub(crate) async fn api<T: DeserializeOwned>(
        &self,
        verb: &str,
        body: &impl Serialize,
    ) -> Result<T, RequestError> {
        let body = serde_json::to_vec(body)
            .map_err(|error| RequestError::Malformed { detail: error.to_string() })?;
        let subject = format!("$JS.API.{verb}");
        let message = self.ask(subject, HeaderMap::new(), body.into(), ANSWER_LIMIT).await?;
        parse(&message)
    }

    /// A request and its raw answer. Waits for the connection first, within the limit.
    ///
    /// Cancel-safe only in that nothing leaks: the request may have been sent.
    pub(crate) async fn ask(
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
        let answers = format!("\"{}.", self.shared.inbox);
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

/// Reads an answer of the JetStream API.
pub(crate) fn parse<T: DeserializeOwned>(message: &Message) -> Result<T, RequestError> {
    match serde_json::from_slice(&message.payload) {
        Ok(Answer::Value(value)) => Ok(value),
        Ok(Answer::Error { error }) => Err(RequestError::Refused {
            code: error.code,
            error: error.err_code,
            description: error.description,
        }),
        Err(error) => Err(RequestError::Malformed { detail: error.to_string() }),
    }
}
