//! Taking work: agents of one kind and pool share a consumer, the server hands each
//! fact to one of them and again to another when it is not acknowledged in time. A
//! lease is nothing but an unacknowledged delivery.

use std::time::Duration;

use async_nats::{HeaderMap, jetstream};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};
use wire::{Pool, WorkKind};

use crate::{
    Bus, Delivery, STREAM,
    backoff::Backoff,
    pull::{Pull, Pulled, nanoseconds},
    read::{self, milliseconds, patiently},
    request::{ANSWER_LIMIT, RequestError, code, parse},
};

/// Each idle agent waits with one pull; more than the biggest fleet.
const MAX_WAITING: i64 = 4096;
/// Facts worked on at the same time, over all agents of the queue.
const MAX_ACK_PENDING: i64 = 10_000;
/// Agents turn poison into a failure fact; a fact the server no longer hands out would be
/// lost without a word.
const MAX_DELIVER: i64 = -1;
/// The server forgets a waiting pull after this; we renew it.
const LONGEST_PULL: Duration = Duration::from_secs(30);
/// A coordinator that starts has its queues ready by then.
const PREPARE_LIMIT: Duration = Duration::from_secs(30);
const SHORTEST_PULL: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    #[error("take {queue} work: the bus did not answer all the time")]
    Unavailable {
        queue: String,
        #[source]
        source: RequestError,
    },
    #[error("take {queue} work: refused")]
    Refused {
        queue: String,
        #[source]
        source: RequestError,
    },
}

/// The facts that call for one kind of work in one pool, each handed to one agent.
pub struct WorkQueue {
    bus: Bus,
    name: String,
    filter: String,
    lease: Duration,
    /// Open between calls only when `next` was cancelled.
    pull: Option<Pull>,
    polled_at: Instant,
}

impl Bus {
    /// Joins the agents that share work of a kind in a pool. `lease` is how long a delivery may
    /// stay without `progress`; the last to join decides it for all. In a closed fleet an agent
    /// finds the queue with the lease it was prepared with.
    ///
    /// Verify and eval work is not divided by pool: all pools share it.
    ///
    /// # Errors
    /// When the server refuses the consumer, or did not answer.
    pub async fn work(
        &self,
        kind: WorkKind,
        pool: &Pool,
        lease: Duration,
    ) -> Result<WorkQueue, WorkError> {
        let mut queue = self.queue(kind, pool, lease);
        let joined = if self.shared.restricted {
            queue.find().await.map(|lease| queue.lease = lease)
        } else {
            patiently(|| queue.create_consumer()).await
        };
        joined.map_err(|source| queue.error(source))?;
        Ok(queue)
    }

    /// Makes a queue for agents that may not make it themselves, or sets its lease.
    ///
    /// # Errors
    /// When the server refuses the consumer, or did not answer.
    pub async fn prepare_work(
        &self,
        kind: WorkKind,
        pool: &Pool,
        lease: Duration,
    ) -> Result<(), WorkError> {
        let queue = self.queue(kind, pool, lease);
        patiently(|| queue.create_consumer()).await.map_err(|source| queue.error(source))
    }

    fn queue(&self, kind: WorkKind, pool: &Pool, lease: Duration) -> WorkQueue {
        WorkQueue {
            bus: self.clone(),
            name: kind.queue(pool),
            filter: kind.filter(pool),
            lease,
            pull: None,
            polled_at: Instant::now(),
        }
    }
}

#[derive(Deserialize)]
struct Found {
    config: FoundConfig,
}

#[derive(Deserialize)]
struct FoundConfig {
    /// In nanoseconds.
    ack_wait: u64,
}

impl WorkQueue {
    /// The consumer's name on the server.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The next fact to work on, as soon as there is one; None after `wait`. Asks for one at a
    /// time and holds nothing back. Outlives restarts of the server and a deleted consumer.
    ///
    /// Cancel-safe: the request stays open and the next call goes on with it, so call again soon
    /// (within a third of the lease) or drop the queue; either way what arrived meanwhile is
    /// taken or given back at once.
    ///
    /// # Errors
    /// `Refused` at once; `Unavailable` when the bus was away for all of `wait`.
    pub async fn next(&mut self, wait: Duration) -> Result<Option<Delivery>, WorkError> {
        let deadline = Instant::now() + wait;
        if self.polled_at.elapsed() > self.lease / 3 {
            self.give_back();
        }
        let mut backoff = Backoff::until(deadline);
        let mut failing = None;
        loop {
            self.polled_at = Instant::now();
            let result = match timeout_at(deadline, self.attempt(deadline)).await {
                Ok(result) => result,
                Err(_) if self.bus.is_connected() => Ok(None),
                Err(_) => Err(RequestError::Disconnected { limit: wait }),
            };
            self.polled_at = Instant::now();
            match result {
                Ok(Some(delivery)) => return Ok(Some(delivery)),
                Ok(None) if Instant::now() >= deadline => return self.nothing(failing),
                Ok(None) => failing = None,
                Err(source) if source.is_transient() => {
                    failing = Some(source);
                    if !backoff.wait().await {
                        return self.nothing(failing);
                    }
                }
                Err(source) => return Err(self.error(source)),
            }
        }
    }

    fn nothing(&self, failing: Option<RequestError>) -> Result<Option<Delivery>, WorkError> {
        match failing {
            Some(source) => Err(self.error(source)),
            None => Ok(None),
        }
    }

    /// Waits on one pull until it ends. None: it ended as it should.
    async fn attempt(&mut self, deadline: Instant) -> Result<Option<Delivery>, RequestError> {
        if self.pull.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            self.bus.shared.connection.wait_connected(left.min(ANSWER_LIMIT)).await?;
            let expires = left.clamp(SHORTEST_PULL, LONGEST_PULL);
            self.pull = Some(Pull::open(&self.bus, STREAM, &self.name, 1, expires).await?);
        }
        loop {
            let Some(pull) = &mut self.pull else { return Ok(None) };
            let pulled = pull.next().await;
            match pulled {
                Pulled::Idle => self.polled_at = Instant::now(),
                Pulled::Message(message) => {
                    self.pull = None;
                    return Ok(self.delivery(message));
                }
                Pulled::Over => {
                    self.pull = None;
                    return Ok(None);
                }
                Pulled::NoConsumer => {
                    self.pull = None;
                    if !self.bus.shared.restricted {
                        self.create_consumer().await?;
                    }
                    return Err(RequestError::Interrupted);
                }
                Pulled::Broken => {
                    self.give_back();
                    return Err(RequestError::Interrupted);
                }
                Pulled::Denied(violation) => {
                    self.pull = None;
                    return Err(RequestError::Denied { violation });
                }
            }
        }
    }

    fn delivery(&self, message: async_nats::Message) -> Option<Delivery> {
        let context = self.bus.shared.context.clone();
        let message = jetstream::Message { message, context };
        let Ok(info) = message.info() else {
            tracing::warn!(subject = %message.subject, "a message without position was skipped");
            return None;
        };
        let (sequence, delivered) = (info.stream_sequence, info.delivered);
        let time_ms = milliseconds(info.published.unix_timestamp_nanos());
        let subject = message.message.subject.to_string();
        let record = read::record(sequence, time_ms, &subject, &message.message.payload);
        Some(Delivery {
            record,
            subject,
            sequence,
            delivered: u64::try_from(delivered).unwrap_or(1),
            lease: self.lease,
            reply: message.message.reply?,
            bus: self.bus.clone(),
        })
    }

    async fn create_consumer(&self) -> Result<(), RequestError> {
        let config = json!({
            "durable_name": self.name,
            "name": self.name,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "replay_policy": "instant",
            "filter_subject": self.filter,
            "ack_wait": nanoseconds(self.lease),
            "max_deliver": MAX_DELIVER,
            "max_ack_pending": MAX_ACK_PENDING,
            "max_waiting": MAX_WAITING,
        });
        // Creates, or brings the lease of an existing one up to date.
        let body = json!({ "stream_name": STREAM, "config": config, "action": "" });
        let verb = format!("CONSUMER.CREATE.{STREAM}.{}.{}", self.name, self.filter);
        self.bus.api::<Value>(&verb, &body).await.map(|_| ())
    }

    /// The lease of the queue that a coordinator has made, or is about to make.
    async fn find(&self) -> Result<Duration, RequestError> {
        let subject = format!("$JS.API.CONSUMER.INFO.{STREAM}.{}", self.name);
        let mut backoff = Backoff::until(Instant::now() + PREPARE_LIMIT);
        loop {
            // Refused with a body, be it `null`.
            let asked = self.bus.ask(subject.clone(), HeaderMap::new(), Bytes::new(), ANSWER_LIMIT);
            match asked.await.and_then(|answer| parse::<Found>(&answer)) {
                Ok(found) => return Ok(Duration::from_nanos(found.config.ack_wait)),
                Err(error) if is_passing(&error) && backoff.wait().await => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Asks for nothing until the next call of `next`; what arrived meanwhile goes back at once.
    pub fn give_back(&mut self) {
        if let Some(pull) = self.pull.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(pull.give_back(self.bus.clone()));
        }
    }

    fn error(&self, source: RequestError) -> WorkError {
        let queue = self.name.clone();
        if source.is_transient() {
            return WorkError::Unavailable { queue, source };
        }
        WorkError::Refused { queue, source }
    }
}

/// A log that is not there yet, or its queue, is made by a coordinator as it starts.
fn is_passing(error: &RequestError) -> bool {
    let missing = [code::CONSUMER_NOT_FOUND, code::STREAM_NOT_FOUND];
    error.is_transient() || missing.iter().any(|code| error.is_code(*code))
}

impl Drop for WorkQueue {
    fn drop(&mut self) {
        self.give_back();
    }
}
