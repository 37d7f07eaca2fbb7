//! Reads a stream in order and without gaps from a position on, without end: across reconnects,
//! server restarts and lost messages. Knows nothing about facts.

use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    Bus,
    backoff::RetryBackoff,
    consumer_pull::{ConsumerPull, PullEvent, duration_nanos},
    ordered_reader::{OrderedReader, ReaderStep},
    point_read::nanos_to_millis,
    request_error::RequestError,
    tail_message::TailMessage,
};

/// Messages of one pull. A small number, because they are sent again after a broken connection.
const PULL_MESSAGES: usize = 256;
/// When this many messages of a pull are missing, the next ones are requested, so that the server
/// never waits for a request.
const PREFETCH_AT: usize = PULL_MESSAGES / 2;
const PULL_EXPIRY: Duration = Duration::from_secs(30);
/// The server deletes a silent consumer after this; the reader then creates another. Short, because
/// a server has room for only some thousand consumers.
const CONSUMER_INACTIVE_LIMIT: Duration = Duration::from_secs(15);
/// Duration of an outage after which the reader yields an error. A cluster elects a leader sooner.
const OUTAGE_LIMIT: Duration = Duration::from_secs(30);

/// A reader of one stream that resumes by itself.
///
/// It opens a session (an ephemeral consumer, or an [`OrderedReader`] for a member that cannot
/// create consumers), yields its messages, and after a failure opens the next session at the last
/// position. `CaughtUp` is yielded once, when the end that existed at the start is reached.
///
/// ```text
/// let mut tail = StreamTail::new(&bus, stream, filters, after);
/// loop { match tail.next().await { /* Message, CaughtUp, or an error */ } }
/// ```
pub(crate) struct StreamTail {
    bus: Bus,
    stream: String,
    filters: Vec<String>,
    /// Position of the last message yielded, or to start after.
    position: u64,
    /// Last matching position that existed at the start; `None` once it was reached.
    target: Option<TailTarget>,
    session: Option<TailSession>,
    backoff: RetryBackoff,
    healthy_at: Instant,
}

#[derive(Clone, Copy)]
enum TailTarget {
    Unknown,
    Position(u64),
}

enum TailSession {
    Consumer(TailConsumer),
    /// For a member that cannot create consumers.
    Reader(OrderedReader),
}

struct TailConsumer {
    name: String,
    /// Messages received. The server numbers deliveries, so a jump shows a lost message.
    deliveries: u64,
    pull: Option<ConsumerPull>,
}

#[derive(Debug)]
pub(crate) enum TailItem {
    Message(TailMessage),
    CaughtUp,
}

/// The reason why a stream cannot be read at present.
#[derive(Debug)]
pub(crate) enum TailError {
    Request(RequestError),
    /// The stream ends at `last`, before `after`, which was already read: it was lost or replaced.
    Truncated {
        after: u64,
        last: u64,
    },
}

impl From<RequestError> for TailError {
    fn from(error: RequestError) -> Self {
        Self::Request(error)
    }
}

impl StreamTail {
    /// Starts after the position `after`. No filters means all messages; filters must not overlap.
    pub(crate) fn new(bus: &Bus, stream: String, filters: Vec<String>, after: u64) -> Self {
        Self {
            bus: bus.clone(),
            stream,
            filters,
            position: after,
            target: Some(TailTarget::Unknown),
            session: None,
            backoff: RetryBackoff::without_deadline(),
            healthy_at: Instant::now(),
        }
    }

    /// Returns the next message in order, and `CaughtUp` once. Continues at its position after an
    /// error.
    pub(crate) async fn next(&mut self) -> Result<TailItem, TailError> {
        loop {
            if self.session.is_some() && self.has_reached_target() {
                self.target = None;
                return Ok(TailItem::CaughtUp);
            }
            if let Err(error) = self.ensure_session().await {
                self.handle_failure(error).await?;
                continue;
            }
            if self.has_reached_target() {
                continue;
            }
            match self.receive_message().await {
                Ok(Some(message)) => return Ok(TailItem::Message(message)),
                Ok(None) => {}
                Err(error) => self.handle_failure(error).await?,
            }
        }
    }

    /// Yields `CaughtUp` once more, when the end that exists now is reached. Returns false if it is
    /// reached already.
    pub(crate) async fn extend_target(&mut self) -> Result<bool, RequestError> {
        let last = self.bus.stream_end(&self.stream).await?;
        let target = self.find_target(last).await?;
        let is_new = target > self.position;
        self.target = is_new.then_some(TailTarget::Position(target));
        // A reader waits for news at the end that it found when it was opened.
        if is_new && matches!(self.session, Some(TailSession::Reader(_))) {
            self.session = None;
        }
        Ok(is_new)
    }

    /// Closes the session and waits for the retry delay. Returns the error if it is permanent or
    /// the outage lasts 30 s.
    async fn handle_failure(&mut self, error: TailError) -> Result<(), TailError> {
        self.session = None;
        self.backoff.wait().await;
        match error {
            TailError::Request(error) if error.is_transient() && !self.take_outage() => Ok(()),
            error => Err(error),
        }
    }

    fn has_reached_target(&self) -> bool {
        matches!(self.target, Some(TailTarget::Position(target)) if self.position >= target)
    }

    /// Returns true once for each 30 s of an outage.
    fn take_outage(&mut self) -> bool {
        let outage = self.healthy_at.elapsed() >= OUTAGE_LIMIT;
        if outage {
            self.healthy_at = Instant::now();
        }
        outage
    }

    /// Opens a session and its pull unless they are open. Checks that the stream does not end
    /// before the present position.
    async fn ensure_session(&mut self) -> Result<(), TailError> {
        if self.session.is_none() {
            let last = self.bus.stream_end(&self.stream).await?;
            if last < self.position {
                return Err(TailError::Truncated { after: self.position, last });
            }
            if let Some(TailTarget::Unknown) = self.target {
                self.target = Some(TailTarget::Position(self.find_target(last).await?));
            }
            self.session = Some(self.start_session().await?);
        }
        if let Some(TailSession::Consumer(consumer)) = &mut self.session {
            consumer.ensure_pull(&self.bus, &self.stream).await?;
        }
        Ok(())
    }

    async fn start_session(&self) -> Result<TailSession, RequestError> {
        if self.bus.shared.restricted {
            let Self { bus, stream, filters, position, .. } = self;
            return Ok(TailSession::Reader(
                OrderedReader::open(bus, stream, filters, *position).await?,
            ));
        }
        let name = self.create_consumer().await?;
        let consumer = TailConsumer { name, deliveries: 0, pull: None };
        Ok(TailSession::Consumer(consumer))
    }

    async fn find_target(&self, last: u64) -> Result<u64, RequestError> {
        if self.filters.is_empty() {
            return Ok(last);
        }
        let mut target = 0;
        for filter in &self.filters {
            let message = self.bus.read_last_message(&self.stream, filter).await?;
            target = target.max(message.map_or(0, |message| message.sequence));
        }
        Ok(target)
    }

    /// Returns the name of a consumer that starts at the present position.
    async fn create_consumer(&self) -> Result<String, RequestError> {
        let inbox = self.bus.shared.client.new_inbox();
        let name = format!("tail-{}", inbox.rsplit('.').next().unwrap_or(&inbox));
        let config = json!({
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self.position + 1,
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subjects": self.filters,
            "inactive_threshold": duration_nanos(CONSUMER_INACTIVE_LIMIT),
            "mem_storage": true,
            "num_replicas": 1,
        });
        let body = json!({ "stream_name": self.stream, "config": config, "action": "create" });
        let verb = format!("CONSUMER.CREATE.{}.{name}", self.stream);
        self.bus.call_api::<Value>(&verb, &body).await?;
        Ok(name)
    }

    /// Returns `None` if the event concerns only the reader itself.
    async fn receive_message(&mut self) -> Result<Option<TailMessage>, TailError> {
        match &mut self.session {
            None => Ok(None),
            Some(TailSession::Reader(reading)) => {
                let step = reading.next(self.position).await?;
                self.mark_healthy();
                Ok(match step {
                    ReaderStep::Message(message) => {
                        self.position = message.sequence;
                        Some(message)
                    }
                    // The target may have been removed meanwhile.
                    ReaderStep::Through(end) => {
                        self.position = end;
                        None
                    }
                })
            }
            Some(TailSession::Consumer(consumer)) => {
                let Some(pull) = &mut consumer.pull else { return Ok(None) };
                let pulled = pull.next().await;
                self.handle_pull_event(pulled)
            }
        }
    }

    /// Returns `None` if the event concerns only the reader itself.
    fn handle_pull_event(&mut self, pulled: PullEvent) -> Result<Option<TailMessage>, TailError> {
        match pulled {
            PullEvent::Message(message) => return Ok(self.accept_message(message)),
            PullEvent::Idle => {
                self.mark_healthy();
                // No message is pending, so the target was removed meanwhile.
                if let Some(TailTarget::Position(_)) = self.target {
                    self.target = Some(TailTarget::Position(self.position));
                }
            }
            PullEvent::Finished => {
                if let Some(TailSession::Consumer(consumer)) = &mut self.session {
                    consumer.pull = None;
                }
                self.mark_healthy();
            }
            PullEvent::ConsumerGone | PullEvent::Broken => {
                return Err(RequestError::Interrupted.into());
            }
            PullEvent::Denied(violation) => return Err(RequestError::Denied { violation }.into()),
        }
        Ok(None)
    }

    /// Drops the session if a message is missing before this one; the next session resumes after
    /// the last good message.
    fn accept_message(&mut self, message: async_nats::Message) -> Option<TailMessage> {
        let context = self.bus.shared.context.clone();
        let message = async_nats::jetstream::Message { message, context };
        let Ok(info) = message.info() else {
            tracing::warn!(subject = %message.subject, "a message without position was skipped");
            return None;
        };
        let Some(TailSession::Consumer(consumer)) = &mut self.session else { return None };
        let is_next = info.consumer_sequence == consumer.deliveries + 1;
        if !is_next || info.stream_sequence <= self.position {
            tracing::debug!(position = self.position, "messages were lost on the way; resuming");
            self.session = None;
            return None;
        }
        consumer.deliveries += 1;
        self.position = info.stream_sequence;
        let time_ms = nanos_to_millis(info.published.unix_timestamp_nanos());
        let sequence = info.stream_sequence;
        self.mark_healthy();
        Some(TailMessage {
            sequence,
            time_ms,
            subject: message.message.subject.to_string(),
            payload: message.message.payload,
        })
    }

    fn mark_healthy(&mut self) {
        self.backoff.reset_delay();
        self.healthy_at = Instant::now();
    }
}

impl TailConsumer {
    /// Opens a pull, and requests more once half of its messages have arrived.
    async fn ensure_pull(&mut self, bus: &Bus, stream: &str) -> Result<(), RequestError> {
        match &mut self.pull {
            None => {
                let pull = ConsumerPull::open(bus, stream, &self.name, PULL_MESSAGES, PULL_EXPIRY);
                self.pull = Some(pull.await?);
            }
            Some(pull) if pull.remaining() <= PREFETCH_AT => pull.request_more().await?,
            Some(_) => {}
        }
        Ok(())
    }
}

impl Drop for StreamTail {
    /// A script that reads many times a second would otherwise exhaust the server's room for
    /// consumers.
    fn drop(&mut self) {
        let Some(TailSession::Consumer(consumer)) = &self.session else { return };
        let subject = format!("$JS.API.CONSUMER.DELETE.{}.{}", self.stream, consumer.name);
        // If the request cannot be sent, the server deletes the consumer after its silence.
        let _ = self.bus.shared.client.publish(subject, Bytes::new()).now_or_never();
    }
}
