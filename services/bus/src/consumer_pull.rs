//! Pull requests to a consumer, and their answers. Not taken from async-nats, whose `batch()` loses
//! the wake-up after a heartbeat and whose `stream()` prefetches.

use std::{cmp, time::Duration};

use async_nats::{Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures::StreamExt;
use serde_json::json;
use tokio::{
    sync::{broadcast, watch},
    time::{sleep, timeout},
};

use crate::{Bus, request_error::RequestError};

/// Determines how soon a silent loss (frozen server, moved leader) is noticed.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);
/// Shorter pulls have no heartbeat; their expiry is soon enough.
const HEARTBEAT_MIN: Duration = Duration::from_millis(250);
/// Additional silence allowed to a busy host.
const SILENCE_GRACE: Duration = Duration::from_secs(1);
/// Above any single message. Two are below the 64 MB that a server buffers for a slow reader before
/// it cuts the connection.
const PULL_BYTES_MAX: usize = 16 << 20;
/// Time to wait for messages in flight when a pull is released.
const RELEASE_LIMIT: Duration = Duration::from_secs(2);

/// Tells with the status that ends a request how many of its messages the server did not send.
const PENDING_HEADER: &str = "Nats-Pending-Messages";

/// Open pull requests with a common inbox. It yields messages until all requested ones have
/// arrived, the time is over, the consumer is gone, or it was silent for longer than two heartbeats
/// plus 1 s.
pub(crate) struct ConsumerPull {
    bus: Bus,
    subscriber: Subscriber,
    inbox: String,
    subject: String,
    request: Bytes,
    silence_limit: Duration,
    batch: usize,
    remaining: usize,
    /// True if a message has arrived.
    has_yielded: bool,
    generation: watch::Receiver<u64>,
    violations: broadcast::Receiver<String>,
}

#[derive(Debug)]
pub(crate) enum PullEvent {
    Message(Message),
    /// Heartbeat: no message is pending, and the server keeps waiting.
    Idle,
    /// All requested messages have arrived, or the time is over; pull again.
    Finished,
    /// The consumer was deleted, or its leader moved.
    ConsumerGone,
    /// The pull is lost on this side; the server may still serve it.
    Broken,
    /// Message of the server that denied the permission.
    Denied(String),
}

impl ConsumerPull {
    /// Requests `batch` messages within `expires`.
    pub(crate) async fn open(
        bus: &Bus,
        stream: &str,
        consumer: &str,
        batch: usize,
        expires: Duration,
    ) -> Result<Self, RequestError> {
        let shared = &bus.shared;
        let mut generation = shared.connection.generation.subscribe();
        generation.borrow_and_update();
        let violations = shared.connection.violations.subscribe();
        let heartbeat =
            Some(cmp::min(HEARTBEAT_INTERVAL, expires / 2)).filter(|h| *h >= HEARTBEAT_MIN);
        let mut body = json!({ "batch": batch, "max_bytes": PULL_BYTES_MAX, "expires": duration_nanos(expires) });
        if let Some(heartbeat) = heartbeat {
            body["idle_heartbeat"] = duration_nanos(heartbeat).into();
        }
        let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}");
        let inbox = shared.client.new_inbox();
        let closed = |_| RequestError::Closed;
        let subscriber = shared.client.subscribe(inbox.clone()).await.map_err(closed)?;
        let silence = heartbeat.map_or(expires, |heartbeat| heartbeat * 2) + SILENCE_GRACE;
        let mut pull = Self {
            bus: bus.clone(),
            subscriber,
            inbox,
            subject,
            request: body.to_string().into(),
            silence_limit: silence,
            batch,
            remaining: 0,
            has_yielded: false,
            generation,
            violations,
        };
        pull.request_more().await?;
        Ok(pull)
    }

    /// Requests the same number of messages again. The server answers open requests in turns, so
    /// only a common inbox keeps their messages in order.
    pub(crate) async fn request_more(&mut self) -> Result<(), RequestError> {
        let (subject, inbox) = (self.subject.clone(), self.inbox.clone());
        let client = &self.bus.shared.client;
        let sent = client.publish_with_reply(subject, inbox, self.request.clone()).await;
        sent.map_err(|_| RequestError::Closed)?;
        self.remaining += self.batch;
        Ok(())
    }

    /// Returns how many of the requested messages have not arrived.
    pub(crate) fn remaining(&self) -> usize {
        self.remaining
    }

    /// Cancel-safe.
    pub(crate) async fn next(&mut self) -> PullEvent {
        if self.remaining == 0 {
            return PullEvent::Finished;
        }
        let denied = format!("\"{}\"", self.subject);
        let silence = sleep(self.silence_limit);
        tokio::pin!(silence);
        loop {
            tokio::select! {
                biased;
                message = self.subscriber.next() => {
                    let Some(message) = message else { return PullEvent::Broken };
                    if let Some(pulled) = self.classify_message(message) {
                        return pulled;
                    }
                }
                _ = self.generation.changed() => return PullEvent::Broken,
                Ok(violation) = self.violations.recv() => {
                    if violation.contains(&denied) {
                        return PullEvent::Denied(violation);
                    }
                }
                () = &mut silence => return PullEvent::Broken,
            }
        }
    }

    /// Returns `None` if the caller has nothing to do yet.
    fn classify_message(&mut self, message: Message) -> Option<PullEvent> {
        Some(match message.status {
            None | Some(StatusCode::OK) => {
                self.remaining = self.remaining.saturating_sub(1);
                self.has_yielded = true;
                PullEvent::Message(message)
            }
            Some(StatusCode::IDLE_HEARTBEAT) => PullEvent::Idle,
            Some(StatusCode::TIMEOUT | StatusCode::NOT_FOUND) => {
                return self.end_request(&message);
            }
            Some(StatusCode::NO_RESPONDERS) => PullEvent::ConsumerGone,
            Some(status) => {
                let description = message.description.clone().unwrap_or_default();
                tracing::debug!(%status, description, subject = self.subject, "pull ended");
                match description.as_str() {
                    // In a cluster, a message is sent only after its delivery was replicated, and
                    // this status overtakes it.
                    "Batch Completed" if self.remaining > 0 => return None,
                    "Batch Completed" => PullEvent::Finished,
                    // The next message does not fit into the remaining size of this pull.
                    "Message Size Exceeds MaxBytes" if self.has_yielded => {
                        return self.end_request(&message);
                    }
                    "Consumer Deleted" | "Leadership Change" => PullEvent::ConsumerGone,
                    _ => PullEvent::Broken,
                }
            }
        })
    }

    /// Counts the messages that an ended request leaves. Returns `None` if another one is open.
    fn end_request(&mut self, status: &Message) -> Option<PullEvent> {
        let header = status.headers.as_ref().and_then(|headers| headers.get(PENDING_HEADER));
        let pending = header.and_then(|pending| pending.as_str().parse().ok());
        self.remaining = self.remaining.saturating_sub(pending.unwrap_or(self.remaining));
        (self.remaining == 0).then_some(PullEvent::Finished)
    }

    /// Returns messages in flight, so that other agents get them at once instead of after the
    /// lease.
    pub(crate) async fn release_messages(mut self) {
        // This fails only if the connection is closed; then no message can be returned.
        let _ = self.subscriber.drain().await;
        while let Ok(Some(message)) = timeout(RELEASE_LIMIT, self.subscriber.next()).await {
            if let (None, Some(reply)) = (message.status, message.reply) {
                let _ = self.bus.shared.client.publish(reply, "-NAK".into()).await;
            }
        }
    }
}

/// Nanoseconds are the unit of the JetStream API.
pub(crate) fn duration_nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
