//! Publishes a fact exactly once: the log refuses a second fact on the same subject.

use std::time::Duration;

use async_nats::{HeaderMap, header};
use bytes::Bytes;
use serde::Deserialize;
use tokio::time::Instant;
use wire::{Fact, Record};

use crate::{
    Bus, LOG_STREAM,
    backoff::RetryBackoff,
    request::{ANSWER_LIMIT, parse_answer},
    request_error::{RequestError, code},
};

pub(crate) const TYPE_HEADER: &str = "Flotilla-Type";
/// Publisher, as `<name> <role>`.
const PRODUCER_HEADER: &str = "Flotilla-Producer";
/// Distinguishes the writers of two equal facts, so that a publisher whose acknowledgement was lost
/// recognises its own fact.
const NONCE_HEADER: &str = "Flotilla-Nonce";
/// Subject filter in which the server looks for the expected last sequence, instead of the subject
/// of the message (nats-server 2.11, `JSExpectedLastSubjSeqSubj`).
const EXPECTED_SUBJECT_HEADER: &str = "Nats-Expected-Last-Subject-Sequence-Subject";
/// Headers count towards the server's payload limit. Those of a fact stay well below this.
const HEADER_BYTES_ALLOWANCE: usize = 1024;
/// A cluster elects a new leader within 8 s; a restarted server is back within 3 s.
const PUBLISH_LIMIT: Duration = Duration::from_secs(30);

/// The outcome of publishing a fact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishOutcome {
    /// Written by this call.
    New { sequence: u64 },
    /// Another call wrote the subject first; `same` is true if its content is equal.
    AlreadyWritten { sequence: u64, same: bool },
}

impl PublishOutcome {
    /// Returns the position of the stored fact.
    pub fn log_sequence(self) -> u64 {
        match self {
            Self::New { sequence } | Self::AlreadyWritten { sequence, .. } => sequence,
        }
    }
}

/// The reason why a fact may not be in the log.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error(
        "publish {subject}: {bytes} bytes, but the bus accepts at most {limit}; ask for \
         fewer tokens or samples per prompt, or raise the nats-server's max_payload (B112)"
    )]
    TooLarge { subject: String, bytes: usize, limit: usize },
    #[error(
        "publish {subject}: the log is full; raise --log-max-gib, keep fewer cycles in it with \
         --keep-cycles, or give the nats-server more storage (B111)"
    )]
    Full {
        subject: String,
        #[source]
        source: RequestError,
    },
    #[error("publish {subject}: not acknowledged; it may or may not be in the log (B116)")]
    Unacknowledged {
        subject: String,
        #[source]
        source: RequestError,
    },
    #[error("publish {subject}: refused")]
    Refused {
        subject: String,
        #[source]
        source: RequestError,
    },
}

impl PublishError {
    /// Returns true if the subject holds an entry that is not a fact, so that no retry can help.
    pub fn is_occupied(&self) -> bool {
        matches!(self, Self::Refused { source: RequestError::Occupied { .. }, .. })
    }
}

/// A fact ready to be sent any number of times.
pub(crate) struct PreparedFact {
    /// Ends with the author in a closed fleet.
    pub(crate) subject: String,
    /// Lacks the author; the fact must be the first on it.
    unauthored_subject: String,
    pub(crate) headers: HeaderMap,
    pub(crate) payload: Bytes,
    /// Identifies this publish when the stored fact is read back.
    nonce: String,
}

#[derive(Deserialize)]
pub(crate) struct PublishAck {
    pub(crate) seq: u64,
}

impl Bus {
    /// Returns the size of the largest fact that the server accepts, in bytes of JSON.
    pub fn max_fact_bytes(&self) -> usize {
        self.shared.client.max_payload().saturating_sub(HEADER_BYTES_ALLOWANCE)
    }

    /// Publishes a fact and waits until the log has it on disk. Repeating the call is harmless.
    ///
    /// Transient failures are retried for 30 s. After a lost acknowledgement, the fact is read back
    /// and recognised by its nonce.
    ///
    /// # Errors
    /// The fact may not be in the log: the server refused it (at once), or did not acknowledge it.
    pub async fn publish_fact(&self, fact: &Fact) -> Result<PublishOutcome, PublishError> {
        let prepared = self.prepare_fact(fact)?;
        self.publish_prepared(&prepared).await
    }

    /// Fails if the fact is larger than the server accepts.
    pub(crate) fn prepare_fact(&self, fact: &Fact) -> Result<PreparedFact, PublishError> {
        let place = fact.subject.to_string();
        let author = self.shared.author.as_ref();
        let subject =
            author.map_or_else(|| place.clone(), |author| fact.subject.with_author(author));
        let payload = Bytes::from(fact.to_json());
        let limit = self.max_fact_bytes();
        if payload.len() > limit {
            return Err(PublishError::TooLarge { subject, bytes: payload.len(), limit });
        }
        let nonce = self.shared.client.new_inbox();
        let headers = self.fact_headers(fact, &place, &nonce);
        Ok(PreparedFact { subject, unauthored_subject: place, headers, payload, nonce })
    }

    pub(crate) async fn publish_prepared(
        &self,
        prepared: &PreparedFact,
    ) -> Result<PublishOutcome, PublishError> {
        let subject = prepared.subject.clone();
        let mut backoff = RetryBackoff::with_deadline(Instant::now() + PUBLISH_LIMIT);
        loop {
            let source = match self.try_publish(prepared).await {
                Ok(published) => return Ok(published),
                Err(source) => source,
            };
            // The server reports a full store as unavailable, but it does not recover by itself.
            if is_store_full(&source) {
                return Err(PublishError::Full { subject, source });
            }
            // A wrong-sequence refusal arrives here if the winning fact is not readable yet.
            if !source.is_transient() && !source.has_server_code(code::WRONG_LAST_SEQUENCE) {
                return Err(PublishError::Refused { subject, source });
            }
            if !backoff.wait().await {
                return Err(PublishError::Unacknowledged { subject, source });
            }
        }
    }

    /// Sends the fact once. If the subject is occupied, reads the stored fact and compares nonce
    /// and content.
    async fn try_publish(
        &self,
        PreparedFact { subject, unauthored_subject: place, headers, payload, nonce }: &PreparedFact,
    ) -> Result<PublishOutcome, RequestError> {
        let sent =
            self.send_request(subject.clone(), headers.clone(), payload.clone(), ANSWER_LIMIT);
        let refused = match parse_answer::<PublishAck>(&sent.await?) {
            Ok(ack) => return Ok(PublishOutcome::New { sequence: ack.seq }),
            Err(error) if error.has_server_code(code::WRONG_LAST_SEQUENCE) => error,
            Err(error) => return Err(error),
        };
        let Some(stored) = self.read_first_message(LOG_STREAM, place).await? else {
            return Err(refused);
        };
        let sequence = stored.sequence;
        if Record::from_log(sequence, 0, &stored.subject, &stored.payload).is_err() {
            return Err(RequestError::Occupied { sequence });
        }
        let ours =
            stored.headers.get(NONCE_HEADER).is_some_and(|value| value.as_str() == nonce.as_str());
        Ok(if ours {
            PublishOutcome::New { sequence }
        } else {
            PublishOutcome::AlreadyWritten { sequence, same: stored.payload == *payload }
        })
    }

    fn fact_headers(&self, fact: &Fact, place: &str, nonce: &str) -> HeaderMap {
        let producer = &self.shared.producer;
        let mut headers = HeaderMap::new();
        headers.insert(header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, "0");
        if self.shared.author.is_some() {
            // The condition covers the facts of all authors.
            headers.insert(EXPECTED_SUBJECT_HEADER, format!("{place}.*"));
        }
        headers.insert(header::NATS_EXPECTED_STREAM, LOG_STREAM);
        headers.insert(TYPE_HEADER, fact.body.message_name());
        headers.insert(NONCE_HEADER, nonce);
        let producer = format!("{} {}", producer.name, producer.role);
        // Skip a header with an invalid value rather than lose the fact.
        if let Ok(value) = producer.parse::<async_nats::HeaderValue>() {
            headers.insert(PRODUCER_HEADER, value);
        }
        headers
    }
}

/// Recognises an exhausted storage or limit.
fn is_store_full(error: &RequestError) -> bool {
    code::STORE_FULL.iter().any(|code| error.has_server_code(*code))
}
