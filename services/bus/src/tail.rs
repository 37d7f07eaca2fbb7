//! Reading a stream in order, without gaps, from a position on, for ever: over
//! reconnects, restarts of the server and lost messages. Knows nothing of facts.

use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    Bus,
    backoff::Backoff,
    pull::{Pull, Pulled, nanoseconds},
    read::milliseconds,
    reading::{Reading, Step},
    request::RequestError,
};

/// Messages a pull asks for: few round trips, and little is sent twice after a break.
const BATCH: usize = 256;
const EXPIRES: Duration = Duration::from_secs(30);
/// The server forgets our consumer when we have been silent for so long; we then begin another
/// where we were. Short, for it has room for some thousand consumers.
const FORGET_AFTER: Duration = Duration::from_secs(15);
/// A cluster without leader recovers sooner; a longer outage is worth an error.
const OUTAGE_LIMIT: Duration = Duration::from_secs(30);

pub(crate) struct Tail {
    bus: Bus,
    stream: String,
    filters: Vec<String>,
    /// The last position delivered, or before the first wanted.
    position: u64,
    /// The last position that existed at the start, until it was reached.
    target: Option<Target>,
    session: Option<Session>,
    backoff: Backoff,
    healthy_at: Instant,
}

#[derive(Clone, Copy)]
enum Target {
    Unknown,
    Position(u64),
}

enum Session {
    Consumer(Consumer),
    /// Of a member that may make no consumers.
    Reading(Reading),
}

struct Consumer {
    name: String,
    /// Deliveries are numbered by the server: a jump is a lost message.
    deliveries: u64,
    pull: Option<Pull>,
}

#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) sequence: u64,
    pub(crate) time_ms: u64,
    pub(crate) subject: String,
    pub(crate) payload: Bytes,
}

#[derive(Debug)]
pub(crate) enum Item {
    Message(Message),
    CaughtUp,
}

#[derive(Debug)]
pub(crate) enum TailError {
    Request(RequestError),
    WentBack { after: u64, last: u64 },
}

impl From<RequestError> for TailError {
    fn from(error: RequestError) -> Self {
        Self::Request(error)
    }
}

impl Tail {
    /// No filters means everything. They must not overlap.
    pub(crate) fn new(bus: &Bus, stream: String, filters: Vec<String>, after: u64) -> Self {
        Self {
            bus: bus.clone(),
            stream,
            filters,
            position: after,
            target: Some(Target::Unknown),
            session: None,
            backoff: Backoff::endless(),
            healthy_at: Instant::now(),
        }
    }

    /// The next message, in order; `CaughtUp` once. After an error it may be called again and
    /// goes on where it was.
    pub(crate) async fn next(&mut self) -> Result<Item, TailError> {
        loop {
            if self.session.is_some() && self.reached_target() {
                self.target = None;
                return Ok(Item::CaughtUp);
            }
            if let Err(error) = self.open().await {
                self.failed(error).await?;
                continue;
            }
            if self.reached_target() {
                continue;
            }
            match self.receive().await {
                Ok(Some(message)) => return Ok(Item::Message(message)),
                Ok(None) => {}
                Err(error) => self.failed(error).await?,
            }
        }
    }

    /// Begins anew a little later, unless the error is one to be told.
    async fn failed(&mut self, error: TailError) -> Result<(), TailError> {
        self.session = None;
        self.backoff.wait().await;
        match error {
            TailError::Request(error) if error.is_transient() && !self.outage() => Ok(()),
            error => Err(error),
        }
    }

    fn reached_target(&self) -> bool {
        matches!(self.target, Some(Target::Position(target)) if self.position >= target)
    }

    /// True once for every so long an outage.
    fn outage(&mut self) -> bool {
        let outage = self.healthy_at.elapsed() >= OUTAGE_LIMIT;
        if outage {
            self.healthy_at = Instant::now();
        }
        outage
    }

    async fn open(&mut self) -> Result<(), TailError> {
        if self.session.is_none() {
            let last = self.bus.stream_end(&self.stream).await?;
            if last < self.position {
                return Err(TailError::WentBack { after: self.position, last });
            }
            if let Some(Target::Unknown) = self.target {
                self.target = Some(Target::Position(self.find_target(last).await?));
            }
            self.session = Some(self.begin().await?);
        }
        if let Some(Session::Consumer(consumer)) = &mut self.session
            && consumer.pull.is_none()
        {
            let pull = Pull::open(&self.bus, &self.stream, &consumer.name, BATCH, EXPIRES);
            consumer.pull = Some(pull.await?);
        }
        Ok(())
    }

    async fn begin(&self) -> Result<Session, RequestError> {
        if self.bus.shared.restricted {
            let Self { bus, stream, filters, position, .. } = self;
            return Ok(Session::Reading(Reading::open(bus, stream, filters, *position).await?));
        }
        let name = self.create_consumer().await?;
        Ok(Session::Consumer(Consumer { name, deliveries: 0, pull: None }))
    }

    async fn find_target(&self, last: u64) -> Result<u64, RequestError> {
        if self.filters.is_empty() {
            return Ok(last);
        }
        let mut target = 0;
        for filter in &self.filters {
            let message = self.bus.last_message(&self.stream, filter).await?;
            target = target.max(message.map_or(0, |message| message.sequence));
        }
        Ok(target)
    }

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
            "inactive_threshold": nanoseconds(FORGET_AFTER),
            "mem_storage": true,
            "num_replicas": 1,
        });
        let body = json!({ "stream_name": self.stream, "config": config, "action": "create" });
        let verb = format!("CONSUMER.CREATE.{}.{name}", self.stream);
        self.bus.api::<Value>(&verb, &body).await?;
        Ok(name)
    }

    /// Waits for one thing to come: a message, or nothing that the caller needs to know.
    async fn receive(&mut self) -> Result<Option<Message>, TailError> {
        match &mut self.session {
            None => Ok(None),
            Some(Session::Reading(reading)) => {
                let step = reading.next(self.position).await?;
                self.healthy();
                Ok(match step {
                    Step::Message(message) => {
                        self.position = message.sequence;
                        Some(message)
                    }
                    // What we aimed at may have been removed meanwhile.
                    Step::Through(end) => {
                        self.position = end;
                        None
                    }
                })
            }
            Some(Session::Consumer(consumer)) => {
                let Some(pull) = &mut consumer.pull else { return Ok(None) };
                let pulled = pull.next().await;
                self.pulled(pulled)
            }
        }
    }

    fn pulled(&mut self, pulled: Pulled) -> Result<Option<Message>, TailError> {
        match pulled {
            Pulled::Message(message) => return Ok(self.accept(message)),
            Pulled::Idle => {
                self.healthy();
                // Nothing is pending: what we aimed at was removed meanwhile.
                if let Some(Target::Position(_)) = self.target {
                    self.target = Some(Target::Position(self.position));
                }
            }
            Pulled::Over => {
                if let Some(Session::Consumer(consumer)) = &mut self.session {
                    consumer.pull = None;
                }
                self.healthy();
            }
            Pulled::NoConsumer | Pulled::Broken => return Err(RequestError::Interrupted.into()),
            Pulled::Denied(violation) => return Err(RequestError::Denied { violation }.into()),
        }
        Ok(None)
    }

    /// Checks that nothing is missing before this message; otherwise starts over behind the
    /// last good one.
    fn accept(&mut self, message: async_nats::Message) -> Option<Message> {
        let context = self.bus.shared.context.clone();
        let message = async_nats::jetstream::Message { message, context };
        let Ok(info) = message.info() else {
            tracing::warn!(subject = %message.subject, "a message without position was skipped");
            return None;
        };
        let Some(Session::Consumer(consumer)) = &mut self.session else { return None };
        let is_next = info.consumer_sequence == consumer.deliveries + 1;
        if !is_next || info.stream_sequence <= self.position {
            tracing::debug!(position = self.position, "messages were lost on the way; resuming");
            self.session = None;
            return None;
        }
        consumer.deliveries += 1;
        self.position = info.stream_sequence;
        let time_ms = milliseconds(info.published.unix_timestamp_nanos());
        let sequence = info.stream_sequence;
        self.healthy();
        Some(Message {
            sequence,
            time_ms,
            subject: message.message.subject.to_string(),
            payload: message.message.payload,
        })
    }

    fn healthy(&mut self) {
        self.backoff.reset();
        self.healthy_at = Instant::now();
    }
}

impl Drop for Tail {
    /// Gives the consumer back: a script that asks many times a second would use up the server's
    /// room for them.
    fn drop(&mut self) {
        let Some(Session::Consumer(consumer)) = &self.session else { return };
        let subject = format!("$JS.API.CONSUMER.DELETE.{}.{}", self.stream, consumer.name);
        // Without room in the channel or a server, its silence says it.
        let _ = self.bus.shared.client.publish(subject, Bytes::new()).now_or_never();
    }
}
