//! Many messages of a stream for one question: a direct get with a batch (NATS ADR-31).

use async_nats::{header, jetstream::message::StreamMessage};
use futures::StreamExt;
use serde_json::json;
use tokio::time::timeout;

use crate::{
    Bus,
    request::{ANSWER_LIMIT, RequestError},
};

const MESSAGES_MAX: usize = 256;
/// Well below what a server keeps for a slow reader before it cuts the connection (64 MB), though
/// the last message may go beyond.
const BYTES_MAX: usize = 8 << 20;

/// The messages of a filter from a position on, as whichever server answers has them, which may be
/// none; in order and without gaps as far as they go.
pub(crate) async fn fetch(
    bus: &Bus,
    stream: &str,
    filter: &str,
    from: u64,
) -> Result<Vec<StreamMessage>, RequestError> {
    fetch_some(bus, stream, filter, from, MESSAGES_MAX).await
}

/// As `fetch`, so many at most.
pub(crate) async fn fetch_some(
    bus: &Bus,
    stream: &str,
    filter: &str,
    from: u64,
    messages: usize,
) -> Result<Vec<StreamMessage>, RequestError> {
    let shared = &bus.shared;
    shared.connection.wait_connected(ANSWER_LIMIT).await?;
    let mut generation = shared.connection.generation.subscribe();
    generation.borrow_and_update();
    let body = json!({
        "seq": from, "next_by_subj": filter, "batch": messages.min(MESSAGES_MAX), "max_bytes": BYTES_MAX,
    });
    let inbox = shared.client.new_inbox();
    let subscribed = shared.client.subscribe(inbox.clone()).await;
    let mut answers = subscribed.map_err(|_| RequestError::Closed)?;
    let subject = format!("$JS.API.DIRECT.GET.{stream}");
    let sent = shared.client.publish_with_reply(subject, inbox, body.to_string().into()).await;
    sent.map_err(|_| RequestError::Closed)?;
    let mut found: Vec<StreamMessage> = Vec::new();
    loop {
        let answer = tokio::select! {
            answer = timeout(ANSWER_LIMIT, answers.next()) => answer,
            _ = generation.changed() => return Err(RequestError::Interrupted),
        };
        let answer = match answer {
            Ok(Some(answer)) => answer,
            Ok(None) => return Err(RequestError::Closed),
            Err(_) => return Err(RequestError::TimedOut { limit: ANSWER_LIMIT }),
        };
        match answer.status.map(|status| status.as_u16()) {
            None => {}
            // The batch's end, nothing there, or a log of before there were batches.
            Some(204 | 404 | 503) => return Ok(found),
            Some(status) => {
                let detail = format!("{status} {}", answer.description.unwrap_or_default());
                return Err(RequestError::Malformed { detail });
            }
        }
        let message = StreamMessage::try_from(answer);
        let message =
            message.map_err(|error| RequestError::Malformed { detail: error.to_string() })?;
        if before(&message) != Some(found.last().map_or(0, |last| last.sequence)) {
            tracing::debug!(from, "messages were lost on the way");
            return Ok(found);
        }
        found.push(message);
    }
}

/// The position of the one sent before it; 0 for a batch's first.
fn before(message: &StreamMessage) -> Option<u64> {
    message.headers.get_last(header::NATS_LAST_SEQUENCE)?.as_str().parse().ok()
}
