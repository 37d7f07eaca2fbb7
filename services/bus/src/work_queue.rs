//! Takes work from the log. Agents of one kind and pool share a consumer; the server hands each
//! fact to one of them, and to another if it is not acknowledged in time. A lease is an
//! unacknowledged delivery.

use std::time::Duration;

use async_nats::{HeaderMap, jetstream};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};
use wire::{Pool, WorkKind};

use crate::{
    Bus, Delivery, LOG_STREAM,
    backoff::RetryBackoff,
    consumer_pull::{ConsumerPull, PullEvent, duration_nanos},
    point_read::{self, nanos_to_millis, with_retries},
    request::{ANSWER_LIMIT, parse_answer},
    request_error::{RequestError, code},
};

/// Each idle agent has a waiting pull; this is more than the largest fleet.
const WAITING_PULLS_MAX: i64 = 4096;
/// Facts in work at the same time, over all agents of a queue.
const ACK_PENDING_MAX: i64 = 10_000;
/// Unlimited: agents turn a poisonous fact into a failure; with a limit, the server would drop it
/// silently.
const DELIVERIES_MAX: i64 = -1;
/// The server drops a waiting pull after this; the queue then opens another.
const PULL_EXPIRY_MAX: Duration = Duration::from_secs(30);
/// Within this time a starting coordinator has created its queues.
const PREPARE_LIMIT: Duration = Duration::from_secs(30);
const PULL_EXPIRY_MIN: Duration = Duration::from_millis(20);

/// The reason why no work could be taken.
#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    #[error("take {queue} work: the bus stopped answering")]
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

/// The facts that request one kind of work in one pool, each handed to one agent.
///
/// ```text
/// let mut queue = bus.join_work_queue(WorkKind::Generate, &pool, lease).await?;
/// while let Some(delivery) = queue.next(wait).await? { /* work, renew, ack */ }
/// ```
pub struct WorkQueue {
    bus: Bus,
    name: String,
    filter: String,
    lease: Duration,
    /// Stays open between calls only if `next` was cancelled.
    pull: Option<ConsumerPull>,
    polled_at: Instant,
}

impl Bus {
    /// Joins the agents that share work of one kind in a pool; verify and eval work is shared by
    /// all pools.
    ///
    /// `lease` is the time that a delivery stays with an agent without renewal; the last agent to
    /// join sets it for all. In a closed fleet the coordinator's lease is used instead.
    pub async fn join_work_queue(
        &self,
        kind: WorkKind,
        pool: &Pool,
        lease: Duration,
    ) -> Result<WorkQueue, WorkError> {
        let mut queue = self.build_work_queue(kind, pool, lease);
        let joined = if self.shared.restricted {
            queue.find_lease().await.map(|lease| queue.lease = lease)
        } else {
            with_retries(|| queue.create_consumer()).await
        };
        joined.map_err(|source| queue.work_error(source))?;
        Ok(queue)
    }

    /// Creates a queue for agents that cannot create it themselves, or updates its lease.
    pub async fn prepare_work_queue(
        &self,
        kind: WorkKind,
        pool: &Pool,
        lease: Duration,
    ) -> Result<(), WorkError> {
        let queue = self.build_work_queue(kind, pool, lease);
        with_retries(|| queue.create_consumer()).await.map_err(|source| queue.work_error(source))
    }

    fn build_work_queue(&self, kind: WorkKind, pool: &Pool, lease: Duration) -> WorkQueue {
        WorkQueue {
            bus: self.clone(),
            name: kind.queue_name(pool),
            filter: kind.subject_filter(pool),
            lease,
            pull: None,
            polled_at: Instant::now(),
        }
    }
}

/// The server's description of a consumer, in part.
#[derive(Deserialize)]
pub(crate) struct ConsumerInfo {
    config: ConsumerInfoConfig,
    /// Facts that are leased to agents.
    pub(crate) num_ack_pending: u64,
}

#[derive(Deserialize)]
struct ConsumerInfoConfig {
    /// The lease, in nanoseconds.
    ack_wait: u64,
}

impl Bus {
    pub(crate) async fn read_consumer_info(
        &self,
        queue: &str,
    ) -> Result<ConsumerInfo, RequestError> {
        let subject = format!("$JS.API.CONSUMER.INFO.{LOG_STREAM}.{queue}");
        // The server refuses this request if it has a body, even `null`.
        let asked = self.send_request(subject, HeaderMap::new(), Bytes::new(), ANSWER_LIMIT);
        parse_answer(&asked.await?)
    }
}

impl WorkQueue {
    /// Returns the name of the consumer on the server.
    pub fn consumer_name(&self) -> &str {
        &self.name
    }

    /// Waits for the next fact to work on; returns `None` after `wait`. Requests one fact at a time
    /// and holds none back. Survives restarts of the server and a deleted consumer.
    ///
    /// Cancel-safe: the pull stays open and the next call continues it. Call again within a third
    /// of the lease, or drop the queue; a fact that arrived meanwhile is then taken or returned at
    /// once.
    ///
    /// Returns `Refused` at once; `Unavailable` if the bus did not answer for all of `wait`.
    pub async fn next(&mut self, wait: Duration) -> Result<Option<Delivery>, WorkError> {
        let deadline = Instant::now() + wait;
        if self.polled_at.elapsed() > self.lease / 3 {
            self.release_pull();
        }
        let mut backoff = RetryBackoff::with_deadline(deadline);
        let mut failing = None;
        loop {
            self.polled_at = Instant::now();
            let result = match timeout_at(deadline, self.try_next(deadline)).await {
                Ok(result) => result,
                Err(_) if self.bus.is_connected() => Ok(None),
                Err(_) => Err(RequestError::Disconnected { limit: wait }),
            };
            self.polled_at = Instant::now();
            match result {
                Ok(Some(delivery)) => return Ok(Some(delivery)),
                Ok(None) if Instant::now() >= deadline => return self.finish_empty(failing),
                Ok(None) => failing = None,
                Err(source) if source.is_transient() => {
                    failing = Some(source);
                    if !backoff.wait().await {
                        return self.finish_empty(failing);
                    }
                }
                Err(source) => return Err(self.work_error(source)),
            }
        }
    }

    /// Returns the last failure, or `None`.
    fn finish_empty(&self, failing: Option<RequestError>) -> Result<Option<Delivery>, WorkError> {
        match failing {
            Some(source) => Err(self.work_error(source)),
            None => Ok(None),
        }
    }

    /// Returns `None` if the pull ended normally without a fact.
    async fn try_next(&mut self, deadline: Instant) -> Result<Option<Delivery>, RequestError> {
        if self.pull.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            self.bus.shared.connection.wait_connected(left.min(ANSWER_LIMIT)).await?;
            let expires = left.clamp(PULL_EXPIRY_MIN, PULL_EXPIRY_MAX);
            self.pull =
                Some(ConsumerPull::open(&self.bus, LOG_STREAM, &self.name, 1, expires).await?);
        }
        loop {
            let Some(pull) = &mut self.pull else { return Ok(None) };
            let pulled = pull.next().await;
            match pulled {
                PullEvent::Idle => self.polled_at = Instant::now(),
                PullEvent::Message(message) => {
                    self.pull = None;
                    return Ok(self.to_delivery(message));
                }
                PullEvent::Finished => {
                    self.pull = None;
                    return Ok(None);
                }
                PullEvent::ConsumerGone => {
                    self.pull = None;
                    if !self.bus.shared.restricted {
                        self.create_consumer().await?;
                    }
                    return Err(RequestError::Interrupted);
                }
                PullEvent::Broken => {
                    self.release_pull();
                    return Err(RequestError::Interrupted);
                }
                PullEvent::Denied(violation) => {
                    self.pull = None;
                    return Err(RequestError::Denied { violation });
                }
            }
        }
    }

    /// Skips a message without a position.
    fn to_delivery(&self, message: async_nats::Message) -> Option<Delivery> {
        let context = self.bus.shared.context.clone();
        let message = jetstream::Message { message, context };
        let Ok(info) = message.info() else {
            tracing::warn!(subject = %message.subject, "a message without position was skipped");
            return None;
        };
        let (sequence, delivered) = (info.stream_sequence, info.delivered);
        let time_ms = nanos_to_millis(info.published.unix_timestamp_nanos());
        let subject = message.message.subject.to_string();
        let record =
            point_read::parse_record(sequence, time_ms, &subject, &message.message.payload);
        Some(Delivery {
            record,
            subject,
            sequence,
            delivered: u64::try_from(delivered).unwrap_or(1),
            queue: self.name.clone(),
            lease: self.lease,
            ack_subject: message.message.reply?,
            bus: self.bus.clone(),
        })
    }

    /// Creates the consumer, or updates the lease of an existing one.
    async fn create_consumer(&self) -> Result<(), RequestError> {
        let config = json!({
            "durable_name": self.name,
            "name": self.name,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "replay_policy": "instant",
            "filter_subject": self.filter,
            "ack_wait": duration_nanos(self.lease),
            "max_deliver": DELIVERIES_MAX,
            "max_ack_pending": ACK_PENDING_MAX,
            "max_waiting": WAITING_PULLS_MAX,
        });
        let body = json!({ "stream_name": LOG_STREAM, "config": config, "action": "" });
        let verb = format!("CONSUMER.CREATE.{LOG_STREAM}.{}.{}", self.name, self.filter);
        self.bus.call_api::<Value>(&verb, &body).await.map(|_| ())
    }

    /// Waits up to 30 s until a coordinator has created the queue.
    async fn find_lease(&self) -> Result<Duration, RequestError> {
        let mut backoff = RetryBackoff::with_deadline(Instant::now() + PREPARE_LIMIT);
        loop {
            match self.bus.read_consumer_info(&self.name).await {
                Ok(found) => return Ok(Duration::from_nanos(found.config.ack_wait)),
                Err(error) if is_temporary(&error) && backoff.wait().await => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Closes the pull until the next call of [`WorkQueue::next`]. A fact that arrived meanwhile is
    /// returned at once.
    pub fn release_pull(&mut self) {
        if let Some(pull) = self.pull.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(pull.release_messages());
        }
    }

    /// Returns `Unavailable` if the failure is transient, otherwise `Refused`.
    fn work_error(&self, source: RequestError) -> WorkError {
        let queue = self.name.clone();
        if source.is_transient() {
            return WorkError::Unavailable { queue, source };
        }
        WorkError::Refused { queue, source }
    }
}

/// Also true while a starting coordinator has not yet created the log or queue.
fn is_temporary(error: &RequestError) -> bool {
    let missing = [code::CONSUMER_NOT_FOUND, code::STREAM_NOT_FOUND];
    error.is_transient() || missing.iter().any(|code| error.has_server_code(*code))
}

impl Drop for WorkQueue {
    fn drop(&mut self) {
        self.release_pull();
    }
}
