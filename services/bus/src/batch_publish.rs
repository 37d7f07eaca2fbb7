//! Publishes several facts as one batch with a single wait for the disk (nats-server 2.12, ADR-50),
//! otherwise individually and in parallel.
//!
//! The server accepts a batch completely or not at all. If it refuses, for example because one of
//! the facts already exists, each fact is published individually.

use async_nats::HeaderMap;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use serde::Deserialize;
use wire::Fact;

use crate::{
    Bus, LOG_STREAM,
    publish::{PreparedFact, PublishAck, PublishError, PublishOutcome},
    request::{ANSWER_LIMIT, parse_answer},
    request_error::RequestError,
};

/// The server accepts a thousand.
const BATCH_FACTS_MAX: usize = 256;
/// The server keeps a batch in memory until it is complete.
const BATCH_BYTES_MAX: usize = 4 << 20;
/// A cluster needs several in flight; a single server that syncs each write gets slower with each
/// additional one.
const FACTS_IN_FLIGHT: usize = 16;

/// Id of the batch, at most 64 characters.
const BATCH_HEADER: &str = "Nats-Batch-Id";
/// Number of a message in its batch, from 1.
const SEQUENCE_HEADER: &str = "Nats-Batch-Sequence";
/// Set on the last message of a batch; commits it.
const COMMIT_HEADER: &str = "Nats-Batch-Commit";

/// The part of `STREAM.INFO` that shows batch support.
#[derive(Deserialize)]
struct BatchStreamInfo {
    config: BatchStreamConfig,
}

#[derive(Deserialize)]
struct BatchStreamConfig {
    #[serde(default)]
    allow_atomic: bool,
}

impl Bus {
    /// Publishes facts that do not depend on each other and waits until all are on disk, in this
    /// order except those already in the log. Repeating the call is harmless.
    ///
    /// # Errors
    /// Fails like [`Bus::publish_fact`] if any fact may not be in the log; others may be in it.
    pub async fn publish_all(&self, facts: &[Fact]) -> Result<Vec<PublishOutcome>, PublishError> {
        let prepared: Vec<PreparedFact> =
            facts.iter().map(|fact| self.prepare_fact(fact)).collect::<Result<_, _>>()?;
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

    /// Publishes like [`Bus::publish_all`], but each fact individually even if the server supports
    /// batches.
    pub async fn publish_unbatched(
        &self,
        facts: &[Fact],
    ) -> Result<Vec<PublishOutcome>, PublishError> {
        let prepared: Vec<PreparedFact> =
            facts.iter().map(|fact| self.prepare_fact(fact)).collect::<Result<_, _>>()?;
        self.publish_individually(&prepared).await
    }

    async fn publish_individually(
        &self,
        facts: &[PreparedFact],
    ) -> Result<Vec<PublishOutcome>, PublishError> {
        let each = facts.iter().map(|fact| self.publish_prepared(fact));
        futures::stream::iter(each).buffered(FACTS_IN_FLIGHT).try_collect().await
    }

    /// Returns the position of the first fact, or `None` if the batch may not be in the log.
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

    /// Asks the server at most once.
    async fn supports_batches(&self) -> bool {
        let known = &self.shared.log_accepts_batches;
        if let Some(accepts) = known.get() {
            return *accepts;
        }
        // An older server would ignore the batch headers and store the messages one by one.
        let asked = self.send_request(
            format!("$JS.API.STREAM.INFO.{LOG_STREAM}"),
            HeaderMap::new(),
            Bytes::new(),
            ANSWER_LIMIT,
        );
        match asked.await.and_then(|answer| parse_answer::<BatchStreamInfo>(&answer)) {
            Ok(info) => *known.get_or_init(|| info.config.allow_atomic),
            Err(_) => false,
        }
    }
}

/// Returns at least 1.
fn next_batch_len(facts: &[PreparedFact]) -> usize {
    let mut bytes = 0;
    let within = facts.iter().take(BATCH_FACTS_MAX).take_while(|fact| {
        bytes += fact.payload.len();
        bytes <= BATCH_BYTES_MAX
    });
    within.count().max(1)
}
