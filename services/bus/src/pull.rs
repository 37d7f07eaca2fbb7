//! One pull request of a consumer and what comes back. Written here rather than taken
//! from async-nats because its batch() loses the wake-up after a heartbeat, and its
//! stream() prefetches.

use std::{cmp, time::Duration};

use async_nats::{Message, StatusCode, Subscriber};
use futures::StreamExt;
use serde_json::json;
use tokio::{
    sync::{broadcast, watch},
    time::{sleep, timeout},
};

use crate::{Bus, request::RequestError};

/// How soon a silent loss (a frozen server, a moved leader) shows.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// Shorter pulls go without heartbeats: their expiry tells as much.
const SHORTEST_HEARTBEAT: Duration = Duration::from_millis(250);
/// Beyond what was promised, for a busy machine.
const GRACE: Duration = Duration::from_secs(1);
/// Above any one message, and below what a server keeps for a slow reader before it cuts the
/// connection (64 MB).
const MAX_BYTES: usize = 32 << 20;
/// For messages in flight when a pull is given back.
const GIVE_BACK_LIMIT: Duration = Duration::from_secs(2);

pub(crate) struct Pull {
    subscriber: Subscriber,
    subject: String,
    silence: Duration,
    batch: usize,
    left: usize,
    generation: watch::Receiver<u64>,
    violations: broadcast::Receiver<String>,
}

#[derive(Debug)]
pub(crate) enum Pulled {
    Message(Message),
    /// Nothing is pending, the server waits with us.
    Idle,
    /// All messages asked for have come, or time is up: pull again.
    Over,
    /// The consumer is gone or its leader moved.
    NoConsumer,
    /// Whatever the server still knows of this pull, we do not.
    Broken,
    Denied(String),
}

impl Pull {
    /// Asks for `batch` messages within `expires`. The answer comes to an inbox of its own,
    /// so that two pulls never mix.
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
        let heartbeat = Some(cmp::min(HEARTBEAT, expires / 2)).filter(|h| *h >= SHORTEST_HEARTBEAT);
        let mut body =
            json!({ "batch": batch, "max_bytes": MAX_BYTES, "expires": nanoseconds(expires) });
        if let Some(heartbeat) = heartbeat {
            body["idle_heartbeat"] = nanoseconds(heartbeat).into();
        }
        let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}");
        let inbox = shared.client.new_inbox();
        let closed = |_| RequestError::Closed;
        let subscriber = shared.client.subscribe(inbox.clone()).await.map_err(closed)?;
        shared
            .client
            .publish_with_reply(subject.clone(), inbox, body.to_string().into())
            .await
            .map_err(|_| RequestError::Closed)?;
        let silence = heartbeat.map_or(expires, |heartbeat| heartbeat * 2) + GRACE;
        Ok(Self { subscriber, subject, silence, batch, left: batch, generation, violations })
    }

    /// What comes next. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Pulled {
        if self.left == 0 {
            return Pulled::Over;
        }
        let denied = format!("\"{}\"", self.subject);
        let silence = sleep(self.silence);
        tokio::pin!(silence);
        loop {
            tokio::select! {
                biased;
                message = self.subscriber.next() => {
                    let Some(message) = message else { return Pulled::Broken };
                    if let Some(pulled) = self.sort(message) {
                        return pulled;
                    }
                }
                _ = self.generation.changed() => return Pulled::Broken,
                Ok(violation) = self.violations.recv() => {
                    if violation.contains(&denied) {
                        return Pulled::Denied(violation);
                    }
                }
                () = &mut silence => return Pulled::Broken,
            }
        }
    }

    /// None: nothing yet that the caller must know.
    fn sort(&mut self, message: Message) -> Option<Pulled> {
        Some(match message.status {
            None | Some(StatusCode::OK) => {
                self.left -= 1;
                Pulled::Message(message)
            }
            Some(StatusCode::IDLE_HEARTBEAT) => Pulled::Idle,
            Some(StatusCode::TIMEOUT | StatusCode::NOT_FOUND) => Pulled::Over,
            Some(StatusCode::NO_RESPONDERS) => Pulled::NoConsumer,
            Some(status) => {
                let description = message.description.unwrap_or_default();
                tracing::debug!(%status, description, subject = self.subject, "pull ended");
                match description.as_str() {
                    // In a cluster a message comes only when its delivery is replicated, and
                    // this word overtakes it.
                    "Batch Completed" if self.left > 0 => return None,
                    "Batch Completed" => Pulled::Over,
                    // The next one does not fit into what is left of this pull.
                    "Message Size Exceeds MaxBytes" if self.left < self.batch => Pulled::Over,
                    "Consumer Deleted" | "Leadership Change" => Pulled::NoConsumer,
                    _ => Pulled::Broken,
                }
            }
        })
    }

    /// Ends the pull and returns messages that were on their way, so that others get them at
    /// once instead of after the lease.
    pub(crate) async fn give_back(mut self, bus: Bus) {
        // Fails only when the connection is closed: then nothing can be given back.
        let _ = self.subscriber.drain().await;
        while let Ok(Some(message)) = timeout(GIVE_BACK_LIMIT, self.subscriber.next()).await {
            if let (None, Some(reply)) = (message.status, message.reply) {
                let _ = bus.shared.client.publish(reply, "-NAK".into()).await;
            }
        }
    }
}

pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
