//! Publishes several facts at once: as one batch with a single wait for the disk if the server
//! supports it (nats-server 2.12, ADR-50), otherwise individually and in parallel.
//!
//! The server accepts a batch completely or not at all. If it refuses, for example because one of
//! the facts already exists, each fact is published individually.

use std::sync::atomic::{AtomicU8, Ordering};

use async_nats::HeaderMap;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use serde::Deserialize;
use wire::Fact;

use crate::{
    Bus, STREAM,
    publish::{PreparedFact, PublishAck, PublishError, PublishOutcome},
    request::{ANSWER_LIMIT, RequestError, parse_answer},
};

/// Most facts of one batch; the server accepts a thousand.
const BATCH_FACTS_MAX: usize = 256;
/// Most payload bytes of one batch. The server keeps them in memory until the batch is complete.
const BATCH_BYTES_MAX: usize = 4 << 20;
/// Most individual facts that wait for an acknowledgement at the same time. A cluster needs several
/// in flight; a single server that syncs each write gets slower with each additional one.
const FACTS_IN_FLIGHT: usize = 16;

/// Header with the id of the batch, at most 64 characters.
const BATCH_HEADER: &str = "Nats-Batch-Id";
/// Header with the number of a message in its batch, from 1.
const SEQUENCE_HEADER: &str = "Nats-Batch-Sequence";
/// Header of the last message of a batch, which commits it.
const COMMIT_HEADER: &str = "Nats-Batch-Commit";

/// The cached batch support of the log: unknown, accepted or refused. It is unknown until the
/// server is asked.
#[derive(Default)]
pub(crate) struct BatchSupport(AtomicU8);

/// The server has not been asked yet.
const SUPPORT_UNKNOWN: u8 = 0;
/// The log accepts batches.
const BATCHES_ACCEPTED: u8 = 1;
/// The log does not accept batches.
const BATCHES_REFUSED: u8 = 2;

/// The part of the stream's description that shows batch support.
#[derive(Deserialize)]
struct BatchStreamInfo {
    config: BatchStreamConfig,
}

/// The part of the stream's configuration that shows batch support.
#[derive(Deserialize)]
struct BatchStreamConfig {
    #[serde(default)]
    allow_atomic: bool,
}

impl Bus {
    /// Publishes facts that do not depend on each other and waits until the log has all of them on
    /// disk. They are stored in this order, except those that were already in the log. Repeating
    /// the call is harmless.
    ///
    /// # Errors
    /// Fails like [`Bus::publish_fact`] if any fact may not be in the log; others may be in it.
    pub async fn publish_all(&self, facts: &[Fact]) -> Result<Vec<PublishOutcome>, PublishError> {
        let prepared: Vec<PreparedFact> =
            facts.iter().map(|fact| self.prepare_fact(fact, None)).collect::<Result<_, _>>()?;
        let mut published = Vec::with_capacity(prepared.len());
        let mut left = &prepared[..];
        while !left.is_empty() {
            let (batch, rest) = left.split_at(next_batch_len(left));
            match self.try_publish_batch(batch).await {
                Some(first) => {
                    let sequences = (first..).take(batch.len());
                    published.extend(sequences.map(|sequence| PublishOutcome::New { sequence }));
                }
                None => published.extend(self.publish_individually(batch).await?),
            }
            left = rest;
        }
        Ok(published)
    }

    /// Publishes each fact individually, even if the server supports batches; otherwise the same as
    /// [`Bus::publish_all`].
    ///
    /// # Errors
    /// Fails in the same cases as [`Bus::publish_all`].
    pub async fn publish_unbatched(
        &self,
        facts: &[Fact],
    ) -> Result<Vec<PublishOutcome>, PublishError> {
        let prepared: Vec<PreparedFact> =
            facts.iter().map(|fact| self.prepare_fact(fact, None)).collect::<Result<_, _>>()?;
        self.publish_individually(&prepared).await
    }

    /// Publishes facts individually, up to 16 in flight.
    async fn publish_individually(
        &self,
        facts: &[PreparedFact],
    ) -> Result<Vec<PublishOutcome>, PublishError> {
        let each = facts.iter().map(|fact| self.publish_prepared(fact));
        futures::stream::iter(each).buffered(FACTS_IN_FLIGHT).try_collect().await
    }

    /// Publishes a batch and returns the position of its first fact. Returns `None` if the batch
    /// may not be in the log.
    async fn try_publish_batch(&self, batch: &[PreparedFact]) -> Option<u64> {
        let (last, others) = batch.split_last().filter(|(_, others)| !others.is_empty())?;
        if !self.supports_batches().await {
            return None;
        }
        match self.send_batch(others, last).await {
            Ok(ack) => Some(ack.seq + 1 - batch.len() as u64),
            Err(error) => {
                tracing::debug!(%error, facts = batch.len(), "a batch was not accepted");
                None
            }
        }
    }

    /// Sends all messages of a batch; the last one commits it.
    async fn send_batch(
        &self,
        others: &[PreparedFact],
        last: &PreparedFact,
    ) -> Result<PublishAck, RequestError> {
        let shared = &self.shared;
        // Messages sent into a broken connection would be delivered later, and incompletely.
        shared.connection.wait_connected(ANSWER_LIMIT).await?;
        let id = shared.client.new_inbox();
        // A batch id has at most 64 characters.
        let id = id.rsplit('.').next().unwrap_or(&id);
        let numbered = |number: usize, fact: &PreparedFact| -> HeaderMap {
            let mut headers = fact.headers.clone();
            headers.insert(BATCH_HEADER, id);
            headers.insert(SEQUENCE_HEADER, (number + 1).to_string());
            headers
        };
        for (number, fact) in others.iter().enumerate() {
            let headers = numbered(number, fact);
            let sent = shared.client.publish_with_headers(
                fact.subject.clone(),
                headers,
                fact.payload.clone(),
            );
            sent.await.map_err(|_| RequestError::Closed)?;
        }
        let mut headers = numbered(others.len(), last);
        headers.insert(COMMIT_HEADER, "1");
        let asked =
            self.send_request(last.subject.clone(), headers, last.payload.clone(), ANSWER_LIMIT);
        parse_answer(&asked.await?)
    }

    /// Returns true if the log accepts batches; asks the server once.
    async fn supports_batches(&self) -> bool {
        let known = &self.shared.batch_support.0;
        if known.load(Ordering::Relaxed) == SUPPORT_UNKNOWN {
            // An older server would ignore the batch headers and store the messages one by one.
            let asked = self.send_request(
                format!("$JS.API.STREAM.INFO.{STREAM}"),
                HeaderMap::new(),
                Bytes::new(),
                ANSWER_LIMIT,
            );
            let Ok(info) = asked.await.and_then(|answer| parse_answer::<BatchStreamInfo>(&answer))
            else {
                return false;
            };
            let found = if info.config.allow_atomic { BATCHES_ACCEPTED } else { BATCHES_REFUSED };
            known.store(found, Ordering::Relaxed);
        }
        known.load(Ordering::Relaxed) == BATCHES_ACCEPTED
    }
}

/// Returns how many of the first facts fit into one batch, at least 1.
fn next_batch_len(facts: &[PreparedFact]) -> usize {
    let mut bytes = 0;
    let within = facts.iter().take(BATCH_FACTS_MAX).take_while(|fact| {
        bytes += fact.payload.len();
        bytes <= BATCH_BYTES_MAX
    });
    within.count().max(1)
}
