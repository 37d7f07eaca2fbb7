//! Writing a fact, once: the log refuses a second fact on the same subject.

use std::time::Duration;

use async_nats::{HeaderMap, header};
use bytes::Bytes;
use serde::Deserialize;
use tokio::time::Instant;
use wire::{Fact, Record};

use crate::{
    Bus, STREAM,
    backoff::Backoff,
    request::{ANSWER_LIMIT, RequestError, code, parse},
};

/// The name of the message a fact carries.
pub(crate) const TYPE_HEADER: &str = "Flotilla-Type";
/// Who wrote it, as `<name> <role>`.
const PRODUCER_HEADER: &str = "Flotilla-Producer";
/// Tells the writer of two equal facts apart, so that a lost ack is no mystery.
const NONCE_HEADER: &str = "Flotilla-Nonce";
/// At which subjects the expected last sequence is looked for, in place of the message's own
/// (nats-server 2.11, `JSExpectedLastSubjSeqSubj`).
const EXPECTED_SUBJECT_HEADER: &str = "Nats-Expected-Last-Subject-Sequence-Subject";
const TRACE_HEADER: &str = "traceparent";
/// Headers count towards the server's payload limit; ours stay well below this.
pub(crate) const HEADER_ALLOWANCE: usize = 1024;
/// A cluster elects a new leader within 8 s; a restarted server is back within 3.
const PUBLISH_LIMIT: Duration = Duration::from_secs(30);

/// What became of a fact that was to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// It is in the log, written by this call.
    New { sequence: u64 },
    /// Somebody else wrote that subject first; `same` when with the same content.
    AlreadyThere { sequence: u64, same: bool },
}

impl Published {
    pub fn sequence(self) -> u64 {
        match self {
            Self::New { sequence } | Self::AlreadyThere { sequence, .. } => sequence,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error(
        "publish {subject}: {bytes} bytes, but the bus accepts at most {limit}; ask for \
         fewer tokens or samples a prompt, or raise the nats-server's max_payload (B112)"
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

/// A fact on its way.
pub(crate) struct Prepared {
    pub(crate) subject: String,
    /// The subject that it is the first on.
    place: String,
    pub(crate) headers: HeaderMap,
    pub(crate) payload: Bytes,
    /// Tells that it was this writing that is found in the log.
    nonce: String,
}

#[derive(Deserialize)]
pub(crate) struct Ack {
    pub(crate) seq: u64,
}

impl Bus {
    /// Writes a fact and waits until the log has it on disk. Repeating it is harmless.
    ///
    /// # Errors
    /// When it cannot be known to be in the log: refused at once, or unacknowledged after
    /// bounded retries.
    pub async fn publish(&self, fact: &Fact) -> Result<Published, PublishError> {
        self.publish_traced(fact, None).await
    }

    /// As `publish`, with a W3C `traceparent` for whoever reacts to the fact.
    ///
    /// # Errors
    /// As `publish`.
    pub async fn publish_traced(
        &self,
        fact: &Fact,
        traceparent: Option<&str>,
    ) -> Result<Published, PublishError> {
        let prepared = self.prepared(fact, traceparent)?;
        self.publish_prepared(&prepared).await
    }

    /// What is sent of a fact, however often it is sent.
    pub(crate) fn prepared(
        &self,
        fact: &Fact,
        traceparent: Option<&str>,
    ) -> Result<Prepared, PublishError> {
        let place = fact.subject.to_string();
        let author = self.shared.author.as_ref();
        let subject = author.map_or_else(|| place.clone(), |author| fact.subject.authored(author));
        let payload = Bytes::from(fact.encode());
        let limit = self.max_fact_bytes();
        if payload.len() > limit {
            return Err(PublishError::TooLarge { subject, bytes: payload.len(), limit });
        }
        let nonce = self.shared.client.new_inbox();
        let headers = self.fact_headers(fact, &place, &nonce, traceparent);
        Ok(Prepared { subject, place, headers, payload, nonce })
    }

    pub(crate) async fn publish_prepared(
        &self,
        prepared: &Prepared,
    ) -> Result<Published, PublishError> {
        let subject = prepared.subject.clone();
        let mut backoff = Backoff::until(Instant::now() + PUBLISH_LIMIT);
        loop {
            let source = match self.publish_attempt(prepared).await {
                Ok(published) => return Ok(published),
                Err(source) => source,
            };
            // The server calls a full store unavailable, but it will not pass by itself.
            if is_full(&source) {
                return Err(PublishError::Full { subject, source });
            }
            // A wrong-sequence refusal gets here when the winner is not readable yet.
            if !source.is_transient() && !source.is_code(code::WRONG_LAST_SEQUENCE) {
                return Err(PublishError::Refused { subject, source });
            }
            if !backoff.wait().await {
                return Err(PublishError::Unacknowledged { subject, source });
            }
        }
    }

    async fn publish_attempt(
        &self,
        Prepared { subject, place, headers, payload, nonce }: &Prepared,
    ) -> Result<Published, RequestError> {
        let sent = self.ask(subject.clone(), headers.clone(), payload.clone(), ANSWER_LIMIT);
        let refused = match parse::<Ack>(&sent.await?) {
            Ok(ack) => return Ok(Published::New { sequence: ack.seq }),
            Err(error) if error.is_code(code::WRONG_LAST_SEQUENCE) => error,
            Err(error) => return Err(error),
        };
        let Some(stored) = self.first_message(STREAM, place).await? else {
            return Err(refused);
        };
        let sequence = stored.sequence;
        if Record::read(sequence, 0, &stored.subject, &stored.payload).is_err() {
            return Err(RequestError::Occupied { sequence });
        }
        let ours =
            stored.headers.get(NONCE_HEADER).is_some_and(|value| value.as_str() == nonce.as_str());
        Ok(if ours {
            Published::New { sequence }
        } else {
            Published::AlreadyThere { sequence, same: stored.payload == *payload }
        })
    }

    fn fact_headers(
        &self,
        fact: &Fact,
        place: &str,
        nonce: &str,
        traceparent: Option<&str>,
    ) -> HeaderMap {
        let producer = &self.shared.producer;
        let mut headers = HeaderMap::new();
        headers.insert(header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, "0");
        if self.shared.author.is_some() {
            // Whoever wrote it.
            headers.insert(EXPECTED_SUBJECT_HEADER, format!("{place}.*"));
        }
        headers.insert(header::NATS_EXPECTED_STREAM, STREAM);
        headers.insert(TYPE_HEADER, fact.body.message_name());
        headers.insert(NONCE_HEADER, nonce);
        for (name, value) in [
            (PRODUCER_HEADER, format!("{} {}", producer.name, producer.role)),
            (TRACE_HEADER, traceparent.unwrap_or_default().to_owned()),
        ] {
            // A header that cannot be written is not worth losing the fact for.
            if let Ok(value) = value.parse::<async_nats::HeaderValue>()
                && !value.as_str().is_empty()
            {
                headers.insert(name, value);
            }
        }
        headers
    }
}

fn is_full(error: &RequestError) -> bool {
    code::STORE_FULL.iter().any(|code| error.is_code(*code))
}
