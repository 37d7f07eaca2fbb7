//! Sends one request to the server and classifies every failure: a denied permission is not
//! reported as a timeout, and an answer lost with the connection is noticed on reconnect.

use std::time::Duration;

use async_nats::{HeaderMap, Message, Request, RequestErrorKind};
use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{Bus, request_error::RequestError};

/// Enough for a disk sync on a busy disk, or a cluster that forwards to its leader. A lost
/// connection is noticed sooner.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(5);

#[derive(Deserialize)]
#[serde(untagged)]
enum ApiAnswer<T> {
    Error { error: ApiError },
    Value(T),
}

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
    /// Sends a request to `$JS.API.<verb>` and parses the answer.
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

    /// Waits for the connection first, within the limit. Dropping the future leaks nothing, but the
    /// request may have been sent.
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

/// Turns an error in the answer into `Refused`.
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
