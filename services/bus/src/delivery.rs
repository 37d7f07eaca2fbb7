//! A fact leased to one agent: renewing, acknowledging or returning it.

use std::time::Duration;

use async_nats::HeaderMap;
use bytes::Bytes;
use serde_json::json;
use tokio::time::Instant;
use wire::{FactError, Record};

use crate::{
    Bus, backoff::RetryBackoff, consumer_pull::duration_nanos, request::ANSWER_LIMIT,
    request_error::RequestError,
};

const ACK_SUBJECT_PREFIX: &str = "$JS.ACK.";

/// Enough for a restart of the server.
const ACK_LIMIT: Duration = Duration::from_secs(15);

/// An acknowledgement that the server did not confirm.
#[derive(Debug, thiserror::Error)]
#[error("{verb} the delivery of {subject}; another agent may get it too")]
pub struct AckError {
    verb: &'static str,
    subject: String,
    #[source]
    source: RequestError,
}

/// A fact leased to this agent.
///
/// States: leased, renewed by [`Delivery::renew_lease`], and ended by [`Delivery::ack`] (done),
/// [`Delivery::nak`] (returned) or expiry. A delivery that is dropped without an acknowledgement
/// expires. After `nak` or expiry, the server hands the fact to an agent again.
///
/// ```text
/// queue.next() -> delivery; every lease/3: renew_lease(); at the end: ack() or nak(delay)
/// ```
#[derive(Debug)]
pub struct Delivery {
    /// Subject in the log, with the author in a closed fleet.
    pub subject: String,
    pub sequence: u64,
    /// Deliveries so far, including this one. Both crashed agents and poisonous facts increase it.
    pub delivered: u64,
    /// On an error the receiver has to publish a failure, because no agent can do the work.
    pub record: Result<Record, FactError>,
    /// The consumer that delivered it.
    pub(crate) queue: String,
    pub(crate) lease: Duration,
    pub(crate) ack_subject: async_nats::Subject,
    pub(crate) bus: Bus,
}

impl Bus {
    /// Returns a delivery on behalf of a process that has ended, by its
    /// [`Delivery::ack_subject_name`]. The server hands the fact out again at once.
    pub async fn release_delivery(&self, name: &str) -> Result<(), RequestError> {
        let plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'*' | b'>');
        if !name.starts_with(ACK_SUBJECT_PREFIX) || !name.bytes().all(plain) {
            return Err(RequestError::Malformed { detail: "no delivery is called so".to_owned() });
        }
        let body = Bytes::from_static(b"-NAK");
        self.send_request(name.to_owned(), HeaderMap::new(), body, ANSWER_LIMIT).await.map(drop)
    }
}

impl Delivery {
    /// Asks the server how many facts of the queue are leased to agents, this one included.
    pub async fn count_leased_facts(&self) -> Result<u64, RequestError> {
        Ok(self.bus.read_consumer_info(&self.queue).await?.num_ack_pending)
    }

    /// Returns the time after which the lease ends unless renewed. Renew after each third of it.
    pub fn lease_duration(&self) -> Duration {
        self.lease
    }

    /// Renews the lease. The server does not confirm it; one lost renewal is harmless. Fails if the
    /// connection is closed for good.
    pub async fn renew_lease(&self) -> Result<(), AckError> {
        let sent = self.bus.shared.client.publish(self.ack_subject.clone(), "+WPI".into()).await;
        sent.map_err(|_| self.ack_error("keep", RequestError::Closed))
    }

    /// Returns the acknowledgement subject, which identifies the delivery in
    /// [`Bus::release_delivery`].
    pub fn ack_subject_name(&self) -> &str {
        &self.ack_subject
    }

    /// Acknowledges the fact as done and waits up to 15 s for the server's confirmation.
    ///
    /// On an error another agent may receive the fact too. The server persists delivery states
    /// later, so a killed server may also hand it out again.
    pub async fn ack(&self) -> Result<(), AckError> {
        self.send_ack("acknowledge", Bytes::from_static(b"+ACK")).await
    }

    /// Returns the fact as not done; an agent receives it again after `delay`, or after the lease
    /// if the server did not confirm.
    pub async fn nak(&self, delay: Duration) -> Result<(), AckError> {
        let body = format!("-NAK {}", json!({ "delay": duration_nanos(delay) }));
        self.send_ack("hand back", body.into()).await
    }

    /// Retries transient failures for 15 s. `verb` names the action in the error.
    async fn send_ack(&self, verb: &'static str, body: Bytes) -> Result<(), AckError> {
        let mut backoff = RetryBackoff::with_deadline(Instant::now() + ACK_LIMIT);
        loop {
            let headers = HeaderMap::new();
            let reply = self.ack_subject.to_string();
            match self.bus.send_request(reply, headers, body.clone(), ANSWER_LIMIT).await {
                Ok(_) => return Ok(()),
                Err(error) if error.is_transient() && backoff.wait().await => {}
                Err(error) => return Err(self.ack_error(verb, error)),
            }
        }
    }

    fn ack_error(&self, verb: &'static str, source: RequestError) -> AckError {
        AckError { verb, subject: self.subject.clone(), source }
    }
}
