//! Reads many messages of a stream with one request: a direct get with a batch (NATS ADR-31).

use async_nats::{header, jetstream::message::StreamMessage};
use futures::StreamExt;
use serde_json::json;
use tokio::time::timeout;

use crate::{Bus, request::ANSWER_LIMIT, request_error::RequestError};

const BATCH_MESSAGES_MAX: usize = 256;
/// The last message may exceed it. Well below the 64 MB that a server buffers for a slow reader
/// before it cuts the connection.
const BATCH_BYTES_MAX: usize = 8 << 20;

/// Reads up to 256 messages of `filter` from the position `from` on, in order and without gaps. Any
/// replica may answer, so the newest messages, or all, may be missing.
pub(crate) async fn fetch_batch(
    bus: &Bus,
    stream: &str,
    filter: &str,
    from: u64,
) -> Result<Vec<StreamMessage>, RequestError> {
    fetch_limited(bus, stream, filter, from, BATCH_MESSAGES_MAX).await
}

/// Reads like [`fetch_batch`], limited to `messages` messages.
pub(crate) async fn fetch_limited(
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
        "seq": from, "next_by_subj": filter, "batch": messages.min(BATCH_MESSAGES_MAX), "max_bytes": BATCH_BYTES_MAX,
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
            // End of the batch, no messages, or a log that was created before batches were enabled.
            Some(204 | 404 | 503) => return Ok(found),
            Some(status) => {
                let detail = format!("{status} {}", answer.description.unwrap_or_default());
                return Err(RequestError::Malformed { detail });
            }
        }
        let message = StreamMessage::try_from(answer);
        let message =
            message.map_err(|error| RequestError::Malformed { detail: error.to_string() })?;
        if previous_sequence(&message) != Some(found.last().map_or(0, |last| last.sequence)) {
            tracing::debug!(from, "messages were lost on the way");
            return Ok(found);
        }
        found.push(message);
    }
}

/// Returns the position of the message sent before this one; 0 for the first of a batch.
fn previous_sequence(message: &StreamMessage) -> Option<u64> {
    message.headers.get_last(header::NATS_LAST_SEQUENCE)?.as_str().parse().ok()
}
