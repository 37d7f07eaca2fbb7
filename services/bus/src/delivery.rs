//! One fact handed to an agent: keeping, finishing or handing back the lease.

use std::time::Duration;

use async_nats::HeaderMap;
use bytes::Bytes;
use serde_json::json;
use tokio::time::Instant;
use wire::{FactError, Record};

use crate::{
    Bus,
    backoff::Backoff,
    pull::nanoseconds,
    request::{ANSWER_LIMIT, RequestError},
};

/// How the names of all deliveries from the log begin.
const DELIVERIES: &str = "$JS.ACK.";

/// For an ack to get through a restart of the server.
const ACK_LIMIT: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
#[error("{verb} the delivery of {subject}; another agent may get it too")]
pub struct AckError {
    verb: &'static str,
    subject: String,
    #[source]
    source: RequestError,
}

/// A fact to work on, ours until the lease ends. Dropping it without an ack lets the lease
/// run out.
#[derive(Debug)]
pub struct Delivery {
    pub subject: String,
    pub sequence: u64,
    /// How often it was handed out, this time included. Counts agents that crashed as well as
    /// poison.
    pub delivered: u64,
    /// An error when the payload is not a fact we understand: somebody must say so in the log.
    pub record: Result<Record, FactError>,
    pub(crate) lease: Duration,
    pub(crate) reply: async_nats::Subject,
    pub(crate) bus: Bus,
}

impl Bus {
    /// Hands a delivery back by its name, for a process that is gone: somebody gets it at once.
    ///
    /// # Errors
    /// When that is no delivery's name, or the server did not confirm.
    pub async fn hand_back(&self, name: &str) -> Result<(), RequestError> {
        let plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'*' | b'>');
        if !name.starts_with(DELIVERIES) || !name.bytes().all(plain) {
            return Err(RequestError::Malformed { detail: "no delivery is called so".to_owned() });
        }
        let body = Bytes::from_static(b"-NAK");
        self.ask(name.to_owned(), HeaderMap::new(), body, ANSWER_LIMIT).await.map(drop)
    }
}

impl Delivery {
    /// How long the delivery stays ours without `progress`; call that every third of it.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Starts the lease anew. Not awaited by the server: one lost beat does no harm.
    ///
    /// # Errors
    /// When the connection is closed for good.
    pub async fn progress(&self) -> Result<(), AckError> {
        let sent = self.bus.shared.client.publish(self.reply.clone(), "+WPI".into()).await;
        sent.map_err(|_| self.error("keep", RequestError::Closed))
    }

    /// What the server knows the delivery by; see [`Bus::hand_back`].
    pub fn name(&self) -> &str {
        &self.reply
    }

    /// Done: nobody gets it again. Waits until the server knows; but it writes down what it
    /// handed out only later, so one that is killed meanwhile may hand this out once more.
    ///
    /// # Errors
    /// When the server did not confirm in bounded time: another agent may get it too.
    pub async fn ack(&self) -> Result<(), AckError> {
        self.settle("acknowledge", Bytes::from_static(b"+ACK")).await
    }

    /// Not done: somebody gets it after `delay`.
    ///
    /// # Errors
    /// When the server did not confirm; it is then handed out after the lease.
    pub async fn nak(&self, delay: Duration) -> Result<(), AckError> {
        let body = format!("-NAK {}", json!({ "delay": nanoseconds(delay) }));
        self.settle("hand back", body.into()).await
    }

    async fn settle(&self, verb: &'static str, body: Bytes) -> Result<(), AckError> {
        let mut backoff = Backoff::until(Instant::now() + ACK_LIMIT);
        loop {
            let headers = HeaderMap::new();
            let reply = self.reply.to_string();
            match self.bus.ask(reply, headers, body.clone(), ANSWER_LIMIT).await {
                Ok(_) => return Ok(()),
                Err(error) if error.is_transient() && backoff.wait().await => {}
                Err(error) => return Err(self.error(verb, error)),
            }
        }
    }

    fn error(&self, verb: &'static str, source: RequestError) -> AckError {
        AckError { verb, subject: self.subject.clone(), source }
    }
}
