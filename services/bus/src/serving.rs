//! Requests to served models: from the gateway to an agent, and the parts of the answer back.
//!
//! Nothing of this is stored. Subjects lie outside of `flotilla.>`, which all members may hear.
//! Parts are numbered, so that a lost one is noticed:
//!
//! ```text
//! flotilla-serving.request.<agent>                            a request, or its cancellation
//! flotilla-serving.answer.<agent>.<gateway>.<request>.<part>  a part of the answer, from 0
//! ```

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_nats::{HeaderMap, Message};
use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use wire::AgentId;

use crate::Bus;

const REQUEST_SUBJECT: &str = "flotilla-serving.request";
const ANSWER_SUBJECT: &str = "flotilla-serving.answer";
/// Identifies a request in its headers: `<gateway>.<request>`.
const REQUEST_HEADER: &str = "Flotilla-Request";
const CHANNEL_HEADER: &str = "Flotilla-Channel";
const PATH_HEADER: &str = "Flotilla-Path";
/// The kind of a part; a part without it is data.
const PART_HEADER: &str = "Flotilla-Part";
/// Parts of an answer that wait for a slow client, and their bytes.
const PARTS_WAITING_MAX: usize = 1024;
const BYTES_WAITING_MAX: usize = 64 << 20;
/// The characters of the reason of a refusal.
const REFUSAL_CHARS_MAX: usize = 1000;

/// A message to an agent that serves models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServingMessage {
    Request(ServingRequest),
    /// The client of the request is gone.
    Cancel {
        id: String,
    },
}

/// A request to the model of a channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServingRequest {
    /// Unique in the fleet.
    pub id: String,
    pub channel: String,
    /// For example `/v1/chat/completions`.
    pub path: String,
    /// The JSON body.
    pub body: Bytes,
}

/// A part of an answer, in this order: `Waiting` any number of times, `Begin`, data, `End`; or
/// `Refused` instead of `Begin`, or at any time after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerPart {
    /// The agent works on the request.
    Waiting,
    Begin(AnswerHead),
    Data(Bytes),
    End,
    /// The agent cannot answer; another one may.
    Refused {
        message: String,
    },
}

impl AnswerPart {
    /// The bytes that it takes while it waits, but for a little.
    fn waiting_bytes(&self) -> usize {
        match self {
            Self::Data(bytes) => bytes.len(),
            Self::Begin(head) => head.content_type.len(),
            Self::Waiting | Self::End | Self::Refused { .. } => 0,
        }
    }
}

/// The status and the content type of an HTTP answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerHead {
    pub status: u16,
    pub content_type: String,
}

/// The reason why a part or a request was not sent.
#[derive(Debug, thiserror::Error)]
#[error("send to the bus: the connection is closed, or the message is too large (B102)")]
pub struct ServingClosed;

/// An agent's answer to one request.
#[derive(Debug, Clone)]
pub struct AnswerSender {
    bus: Bus,
    subject: String,
    next: Arc<std::sync::atomic::AtomicU64>,
}

impl AnswerSender {
    /// Sends the next part. Parts of one answer must be sent by one task.
    ///
    /// # Errors
    /// The connection is closed for good.
    pub async fn send_part(&self, part: AnswerPart) -> Result<(), ServingClosed> {
        let number = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let subject = format!("{}.{number}", self.subject);
        let client = &self.bus.shared.client;
        let (kind, payload) = match part {
            AnswerPart::Data(bytes) => {
                return client.publish(subject, bytes).await.map_err(|_| ServingClosed);
            }
            AnswerPart::Waiting => ("waiting", Bytes::new()),
            AnswerPart::Begin(head) => {
                let json = serde_json::to_vec(&head).expect("only texts and numbers");
                ("begin", json.into())
            }
            AnswerPart::End => ("end", Bytes::new()),
            AnswerPart::Refused { message } => ("refused", message.into()),
        };
        let mut headers = HeaderMap::new();
        headers.insert(PART_HEADER, kind);
        client.publish_with_headers(subject, headers, payload).await.map_err(|_| ServingClosed)
    }
}

impl Bus {
    /// Yields the requests to an agent from now on.
    ///
    /// # Errors
    /// The connection is closed for good.
    pub async fn receive_serving_requests(
        &self,
        agent: &AgentId,
    ) -> Result<BoxStream<'static, ServingMessage>, ServingClosed> {
        let subject = format!("{REQUEST_SUBJECT}.{agent}");
        let messages = self.shared.client.subscribe(subject).await.map_err(|_| ServingClosed)?;
        Ok(messages.filter_map(|message| std::future::ready(parse_request(&message))).boxed())
    }

    /// Returns the sender of an agent's answer to a request.
    pub fn open_answer(&self, agent: &AgentId, request: &str) -> AnswerSender {
        let subject = format!("{ANSWER_SUBJECT}.{agent}.{request}");
        AnswerSender { bus: self.clone(), subject, next: Arc::default() }
    }

    /// Starts to receive the answers to requests of a gateway of this name, which no other has.
    ///
    /// # Errors
    /// The connection is closed for good.
    pub async fn open_serving_client(&self, gateway: &str) -> Result<ServingClient, ServingClosed> {
        let subject = format!("{ANSWER_SUBJECT}.*.{gateway}.>");
        let mut parts = self.shared.client.subscribe(subject).await.map_err(|_| ServingClosed)?;
        let waiting: WaitingAnswers = Arc::default();
        let known = waiting.clone();
        let task = tokio::spawn(async move {
            while let Some(message) = parts.next().await {
                deliver_part(&known, message);
            }
        });
        let task = Arc::new(AbortOnDrop(task));
        let (bus, gateway) = (self.clone(), gateway.to_owned());
        Ok(ServingClient { bus, gateway, waiting, next: Arc::default(), _task: task })
    }
}

type WaitingAnswers = Arc<Mutex<HashMap<String, PartReceiver>>>;

#[derive(Debug)]
struct PartReceiver {
    /// The agent that was asked; others may not answer.
    agent: AgentId,
    parts: mpsc::Sender<AnswerPart>,
    /// Bytes of the parts that wait.
    bytes: Arc<AtomicUsize>,
    next: u64,
}

impl PartReceiver {
    /// Returns false if parts were lost, or too many wait.
    fn accept_part(&mut self, number: u64, message: &Message) -> bool {
        let Some(part) = parse_part(message).filter(|_| number == self.next) else { return false };
        self.next += 1;
        let before = self.bytes.fetch_add(part.waiting_bytes(), Ordering::Relaxed);
        before + part.waiting_bytes() <= BYTES_WAITING_MAX && self.parts.try_send(part).is_ok()
    }
}

/// Stops the task that receives answers.
#[derive(Debug)]
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A gateway's side: sends requests to agents and receives their answers. Clones share it.
#[derive(Debug, Clone)]
pub struct ServingClient {
    bus: Bus,
    gateway: String,
    waiting: WaitingAnswers,
    next: Arc<std::sync::atomic::AtomicU64>,
    _task: Arc<AbortOnDrop>,
}

/// The parts of an answer. Dropping it tells the agent to stop, unless the answer has ended.
#[derive(Debug)]
pub struct AnswerReceiver {
    client: ServingClient,
    agent: AgentId,
    id: String,
    parts: mpsc::Receiver<AnswerPart>,
    bytes: Arc<AtomicUsize>,
    has_ended: bool,
}

impl ServingClient {
    /// Sends a request to an agent and returns the parts of its answer.
    ///
    /// # Errors
    /// The connection is closed for good.
    pub async fn send_request(
        &self,
        agent: &AgentId,
        channel: &str,
        path: &str,
        body: Bytes,
    ) -> Result<AnswerReceiver, ServingClosed> {
        let number = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let id = format!("{}.{number}", self.gateway);
        let (sender, parts) = mpsc::channel(PARTS_WAITING_MAX);
        let bytes = Arc::new(AtomicUsize::new(0));
        let waiting =
            PartReceiver { agent: agent.clone(), parts: sender, bytes: bytes.clone(), next: 0 };
        self.lock_waiting().insert(id.clone(), waiting);
        let (client, agent) = (self.clone(), agent.clone());
        let receiver = AnswerReceiver { client, agent, id, parts, bytes, has_ended: false };
        let mut headers = HeaderMap::new();
        headers.insert(REQUEST_HEADER, receiver.id.as_str());
        headers.insert(CHANNEL_HEADER, channel);
        headers.insert(PATH_HEADER, path);
        let subject = format!("{REQUEST_SUBJECT}.{}", receiver.agent);
        let sent = self.bus.shared.client.publish_with_headers(subject, headers, body).await;
        sent.map_err(|_| ServingClosed)?;
        Ok(receiver)
    }

    fn lock_waiting(&self) -> std::sync::MutexGuard<'_, HashMap<String, PartReceiver>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AnswerReceiver {
    /// Returns the next part. `None` if parts were lost, or the reader was too slow.
    pub async fn next_part(&mut self) -> Option<AnswerPart> {
        let part = self.parts.recv().await;
        let bytes = part.as_ref().map_or(0, AnswerPart::waiting_bytes);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.has_ended |= matches!(part, Some(AnswerPart::End | AnswerPart::Refused { .. }));
        part
    }

    /// Returns true once the last part was returned.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }
}

impl Drop for AnswerReceiver {
    fn drop(&mut self) {
        self.client.lock_waiting().remove(&self.id);
        if self.has_ended {
            return;
        }
        let (bus, agent, id) = (self.client.bus.clone(), self.agent.clone(), self.id.clone());
        tokio::spawn(async move {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_HEADER, id.as_str());
            let subject = format!("{REQUEST_SUBJECT}.{agent}");
            // Without it the agent computes an answer that nobody reads.
            let _ = bus.shared.client.publish_with_headers(subject, headers, Bytes::new()).await;
        });
    }
}

/// Returns `None` for a message without the headers of a request.
fn parse_request(message: &Message) -> Option<ServingMessage> {
    let headers = message.headers.as_ref()?;
    let header = |name: &str| headers.get(name).map(|value| value.as_str().to_owned());
    let id = header(REQUEST_HEADER)?;
    // The id becomes a part of a subject.
    let is_token = |text: &str| {
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    let is_id = id.split_once('.').is_some_and(|(gateway, it)| is_token(gateway) && is_token(it));
    if !is_id {
        return None;
    }
    let Some(channel) = header(CHANNEL_HEADER) else { return Some(ServingMessage::Cancel { id }) };
    let (path, body) = (header(PATH_HEADER)?, message.payload.clone());
    Some(ServingMessage::Request(ServingRequest { id, channel, path, body }))
}

/// Forwards a part to the request that waits for it. An answer with a gap ends.
fn deliver_part(waiting: &WaitingAnswers, message: Message) {
    let mut tokens = message.subject.rsplit('.');
    let number = tokens.next().and_then(|number| number.parse::<u64>().ok());
    let (request, gateway, agent) = (tokens.next(), tokens.next(), tokens.next());
    let (Some(number), Some(request), Some(gateway)) = (number, request, gateway) else { return };
    let id = format!("{gateway}.{request}");
    let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(receiver) = waiting.get_mut(&id) else { return };
    if agent != Some(receiver.agent.as_str()) {
        return;
    }
    if !receiver.accept_part(number, &message) {
        waiting.remove(&id);
    }
}

fn parse_part(message: &Message) -> Option<AnswerPart> {
    let kind = message.headers.as_ref().and_then(|headers| headers.get(PART_HEADER));
    Some(match kind.map(async_nats::HeaderValue::as_str) {
        None => AnswerPart::Data(message.payload.clone()),
        Some("waiting") => AnswerPart::Waiting,
        Some("begin") => AnswerPart::Begin(serde_json::from_slice(&message.payload).ok()?),
        Some("end") => AnswerPart::End,
        Some("refused") => {
            let message = String::from_utf8_lossy(&message.payload);
            AnswerPart::Refused { message: message.chars().take(REFUSAL_CHARS_MAX).collect() }
        }
        Some(_) => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_wait_for_a_slow_client_are_bounded_in_bytes() {
        let (parts, mut received) = mpsc::channel(PARTS_WAITING_MAX);
        let bytes = Arc::new(AtomicUsize::new(0));
        let agent = "a".parse().unwrap();
        let mut waiting = PartReceiver { agent, parts, bytes: bytes.clone(), next: 0 };
        let message = |payload: &Bytes| Message {
            subject: "flotilla-serving.answer.a.g.1.0".into(),
            reply: None,
            payload: payload.clone(),
            headers: None,
            status: None,
            description: None,
            length: 0,
        };
        let quarter = message(&Bytes::from(vec![0; BYTES_WAITING_MAX / 4]));
        for number in 0..4 {
            assert!(waiting.accept_part(number, &quarter), "{number}");
        }
        let small = message(&Bytes::from_static(b"a"));
        assert!(!waiting.accept_part(4, &small), "one byte too much");
        // The client takes a part.
        assert!(matches!(received.try_recv(), Ok(AnswerPart::Data(_))));
        bytes.fetch_sub(BYTES_WAITING_MAX / 4 + 1, Ordering::Relaxed);
        assert!(waiting.accept_part(5, &quarter));
        assert!(!waiting.accept_part(7, &small), "a part is lost");
    }

    #[test]
    fn the_reason_of_a_refusal_is_cut() {
        let mut headers = HeaderMap::new();
        headers.insert(PART_HEADER, "refused");
        let refused = Message {
            subject: "flotilla-serving.answer.a.g.1.0".into(),
            reply: None,
            payload: vec![b'x'; 1 << 20].into(),
            headers: Some(headers),
            status: None,
            description: None,
            length: 0,
        };
        let expected = AnswerPart::Refused { message: "x".repeat(REFUSAL_CHARS_MAX) };
        assert_eq!(parse_part(&refused), Some(expected));
    }
}
