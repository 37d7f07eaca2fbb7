//! Writing several facts at once: as one batch with one wait for the disk where the server has
//! such batches (nats-server 2.12, ADR-50), and otherwise all in flight together.
//!
//! A batch is accepted whole or not at all. Where it is not, say because somebody else wrote one
//! of its facts, each of them is written by itself.

use std::sync::atomic::{AtomicU8, Ordering};

use async_nats::HeaderMap;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use serde::Deserialize;
use wire::Fact;

use crate::{
    Bus, STREAM,
    publish::{Ack, Prepared, PublishError, Published},
    request::{ANSWER_LIMIT, RequestError, parse},
};

/// The server takes a thousand.
const BATCH_MAX: usize = 256;
/// Held in the server's memory until the batch is whole.
const BATCH_BYTES_MAX: usize = 4 << 20;
/// Facts written one by one, with their acknowledgements awaited together: a cluster needs some in
/// flight, while a single server that writes each to disk is slower the more there are.
const IN_FLIGHT: usize = 16;

const BATCH_HEADER: &str = "Nats-Batch-Id";
const SEQUENCE_HEADER: &str = "Nats-Batch-Sequence";
const COMMIT_HEADER: &str = "Nats-Batch-Commit";

/// Whether the log takes batches, once somebody has looked.
#[derive(Default)]
pub(crate) struct Batches(AtomicU8);

const UNKNOWN: u8 = 0;
const TAKEN: u8 = 1;
const REFUSED: u8 = 2;

#[derive(Deserialize)]
struct Info {
    config: Config,
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    allow_atomic: bool,
}

impl Bus {
    /// Writes facts that do not depend on each other and waits until the log has all of them on
    /// disk, in this order where nobody wrote one of them before. Repeating it is harmless.
    ///
    /// # Errors
    /// As [`Bus::publish`], when one of them cannot be known to be in the log; others may be.
    pub async fn publish_all(&self, facts: &[Fact]) -> Result<Vec<Published>, PublishError> {
        let prepared: Vec<Prepared> =
            facts.iter().map(|fact| self.prepared(fact, None)).collect::<Result<_, _>>()?;
        let mut published = Vec::with_capacity(prepared.len());
        let mut left = &prepared[..];
        while !left.is_empty() {
            let (batch, rest) = left.split_at(fits(left));
            match self.publish_batch(batch).await {
                Some(first) => {
                    let sequences = (first..).take(batch.len());
                    published.extend(sequences.map(|sequence| Published::New { sequence }));
                }
                None => published.extend(self.publish_each(batch).await?),
            }
            left = rest;
        }
        Ok(published)
    }

    /// As `publish_all`, each fact by itself, whatever the server has.
    ///
    /// # Errors
    /// As `publish_all`.
    pub async fn publish_in_flight(&self, facts: &[Fact]) -> Result<Vec<Published>, PublishError> {
        let prepared: Vec<Prepared> =
            facts.iter().map(|fact| self.prepared(fact, None)).collect::<Result<_, _>>()?;
        self.publish_each(&prepared).await
    }

    async fn publish_each(&self, facts: &[Prepared]) -> Result<Vec<Published>, PublishError> {
        let each = facts.iter().map(|fact| self.publish_prepared(fact));
        futures::stream::iter(each).buffered(IN_FLIGHT).try_collect().await
    }

    /// The first position of a batch; `None` when it may not be in the log.
    async fn publish_batch(&self, batch: &[Prepared]) -> Option<u64> {
        let (last, others) = batch.split_last().filter(|(_, others)| !others.is_empty())?;
        if !self.takes_batches().await {
            return None;
        }
        match self.send_batch(others, last).await {
            Ok(ack) => Some(ack.seq + 1 - batch.len() as u64),
            Err(error) => {
                tracing::debug!(%error, facts = batch.len(), "a batch was not taken");
                None
            }
        }
    }

    async fn send_batch(&self, others: &[Prepared], last: &Prepared) -> Result<Ack, RequestError> {
        let shared = &self.shared;
        // What is sent into a broken connection would come out of it later, and in pieces.
        shared.connection.wait_connected(ANSWER_LIMIT).await?;
        let id = shared.client.new_inbox();
        // At most 64 characters.
        let id = id.rsplit('.').next().unwrap_or(&id);
        let numbered = |number: usize, fact: &Prepared| -> HeaderMap {
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
        let asked = self.ask(last.subject.clone(), headers, last.payload.clone(), ANSWER_LIMIT);
        parse(&asked.await?)
    }

    async fn takes_batches(&self) -> bool {
        let known = &self.shared.batches.0;
        if known.load(Ordering::Relaxed) == UNKNOWN {
            // An older server ignores what makes messages a batch.
            let asked = self.ask(
                format!("$JS.API.STREAM.INFO.{STREAM}"),
                HeaderMap::new(),
                Bytes::new(),
                ANSWER_LIMIT,
            );
            let Ok(info) = asked.await.and_then(|answer| parse::<Info>(&answer)) else {
                return false;
            };
            let found = if info.config.allow_atomic { TAKEN } else { REFUSED };
            known.store(found, Ordering::Relaxed);
        }
        known.load(Ordering::Relaxed) == TAKEN
    }
}

/// How many of the first go into one batch.
fn fits(facts: &[Prepared]) -> usize {
    let mut bytes = 0;
    let within = facts.iter().take(BATCH_MAX).take_while(|fact| {
        bytes += fact.payload.len();
        bytes <= BATCH_BYTES_MAX
    });
    within.count().max(1)
}
