//! Requests to served models that are kept with their answers, and the feedback of users. Does not
//! know what the values mean.
//!
//! The subjects lie outside of `flotilla.>`, which all members may hear. Each message expires:
//!
//! ```text
//! flotilla-serving.kept.<channel>.<exchange>.answer     a request and its answer, written once
//! flotilla-serving.kept.<channel>.<exchange>.feedback   the newest feedback replaces the last
//! ```

use std::{collections::VecDeque, time::Duration};

use async_nats::{
    HeaderMap, header,
    jetstream::stream::{Config, DiscardPolicy, RetentionPolicy, StorageType},
};
use bytes::Bytes;
use wire::RunId;

use crate::{
    Bus, EXCHANGES_STREAM,
    point_read::with_retries,
    prepare::PrepareError,
    publish::PublishAck,
    request::{ANSWER_LIMIT, parse_answer},
    request_error::{RequestError, code},
    stream_tail::{StreamTail, TailError, TailItem},
};

const KEPT_SUBJECT: &str = "flotilla-serving.kept";
/// Seconds after which the server deletes a message (nats-server 2.11).
const TTL_HEADER: &str = "Nats-TTL";
/// Longest time in days for which exchanges are kept.
pub const KEEP_DAYS_MAX: u32 = 365;
const SECONDS_PER_DAY: u64 = 86_400;
/// Maximum messages of all channels; beyond it, the server deletes the oldest.
const MESSAGES_MAX: i64 = 100_000;
/// Maximum bytes of messages in a list, which its reader holds in memory.
const LISTED_BYTES_MAX: usize = 256 << 20;
/// Maximum bytes of a conversation; longer ones are not kept.
pub const EXCHANGE_BYTES_MAX: usize = 64 << 10;

/// The two messages of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExchangePart {
    /// The request with its answer.
    Answer,
    Feedback,
}

impl ExchangePart {
    fn as_str(self) -> &'static str {
        match self {
            Self::Answer => "answer",
            Self::Feedback => "feedback",
        }
    }
}

/// A message about an exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangeMessage {
    pub sequence: u64,
    pub time_ms: u64,
    pub exchange: String,
    pub part: ExchangePart,
    pub payload: Bytes,
}

/// The reason why kept requests could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{what} the kept requests")]
pub struct ExchangeError {
    what: &'static str,
    #[source]
    source: RequestError,
}

impl ExchangeError {
    /// Returns the failure of the request to the server.
    pub fn request_error(&self) -> &RequestError {
        &self.source
    }
}

impl Bus {
    /// Creates the stream of kept requests if it is missing.
    ///
    /// # Errors
    /// The server refuses, or another stream has that name.
    pub async fn prepare_exchanges(&self, replicas: usize) -> Result<(), PrepareError> {
        let config = || Config {
            name: EXCHANGES_STREAM.to_owned(),
            description: Some("flotilla: kept requests to models, and feedback".to_owned()),
            subjects: vec![format!("{KEPT_SUBJECT}.*.*.*")],
            retention: RetentionPolicy::Limits,
            storage: StorageType::File,
            num_replicas: replicas,
            discard: DiscardPolicy::Old,
            max_age: Duration::from_secs(SECONDS_PER_DAY * u64::from(KEEP_DAYS_MAX)),
            max_bytes: -1,
            max_messages: MESSAGES_MAX,
            max_messages_per_subject: 1,
            max_consumers: -1,
            allow_direct: true,
            allow_message_ttl: true,
            ..Config::default()
        };
        self.ensure_stream(config(), config()).await.map(|_| ())
    }

    /// Keeps a request with its answer, or feedback, for some days. An exchange that is kept already
    /// stays as it is.
    ///
    /// # Errors
    /// The server does not acknowledge.
    pub async fn write_exchange(
        &self,
        channel: &RunId,
        exchange: &str,
        part: ExchangePart,
        payload: Bytes,
        days: u32,
    ) -> Result<(), ExchangeError> {
        let seconds = SECONDS_PER_DAY * u64::from(days.clamp(1, KEEP_DAYS_MAX));
        let write = async || {
            let mut headers = HeaderMap::new();
            headers.insert(TTL_HEADER, format!("{seconds}s"));
            if part == ExchangePart::Answer {
                headers.insert(header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, "0");
            }
            let subject = exchange_subject(channel, exchange, part);
            let answer = self.send_request(subject, headers, payload.clone(), ANSWER_LIMIT).await?;
            parse_answer::<PublishAck>(&answer).map(|_| ())
        };
        match with_retries(write).await {
            Err(error) if error.has_server_code(code::WRONG_LAST_SEQUENCE) => Ok(()),
            written => written.map_err(|source| ExchangeError { what: "write", source }),
        }
    }

    /// Returns a part of an exchange; `None` if it is not kept.
    ///
    /// # Errors
    /// The bus does not answer, or denies access.
    pub async fn read_exchange(
        &self,
        channel: &RunId,
        exchange: &str,
        part: ExchangePart,
    ) -> Result<Option<Bytes>, ExchangeError> {
        let subject = exchange_subject(channel, exchange, part);
        match with_retries(|| self.read_last_message(EXCHANGES_STREAM, &subject)).await {
            Ok(found) => Ok(found.map(|message| message.payload)),
            Err(error) if error.has_server_code(code::STREAM_NOT_FOUND) => Ok(None),
            Err(source) => Err(ExchangeError { what: "read", source }),
        }
    }

    /// Returns the messages about a channel's exchanges after a position, oldest first. Of more than
    /// 256 MiB, the oldest are left out.
    ///
    /// # Errors
    /// As [`Bus::read_exchange`].
    pub async fn list_exchanges(
        &self,
        channel: &RunId,
        after: u64,
    ) -> Result<Vec<ExchangeMessage>, ExchangeError> {
        let filters = vec![format!("{KEPT_SUBJECT}.{channel}.*.*")];
        let open =
            |after| StreamTail::new(self, EXCHANGES_STREAM.to_owned(), filters.clone(), after);
        let mut tail = open(after);
        let mut newest = NewestMessages::new(LISTED_BYTES_MAX);
        loop {
            match tail.next().await {
                Ok(TailItem::CaughtUp) => return Ok(newest.messages.into()),
                Ok(TailItem::Message(message)) => {
                    parse_message(message).into_iter().for_each(|message| newest.add(message));
                }
                Err(TailError::Request(error)) if error.has_server_code(code::STREAM_NOT_FOUND) => {
                    return Ok(Vec::new());
                }
                Err(TailError::Request(source)) => {
                    return Err(ExchangeError { what: "list", source });
                }
                // The stream was replaced.
                Err(TailError::Truncated { .. }) => {
                    tail = open(0);
                    newest = NewestMessages::new(LISTED_BYTES_MAX);
                }
            }
        }
    }
}

/// The newest messages, up to a number of bytes.
struct NewestMessages {
    messages: VecDeque<ExchangeMessage>,
    bytes: usize,
    bytes_max: usize,
}

impl NewestMessages {
    fn new(bytes_max: usize) -> Self {
        Self { messages: VecDeque::new(), bytes: 0, bytes_max }
    }

    fn add(&mut self, message: ExchangeMessage) {
        self.bytes += message.payload.len();
        self.messages.push_back(message);
        while self.bytes > self.bytes_max {
            let Some(oldest) = self.messages.pop_front() else { break };
            self.bytes -= oldest.payload.len();
        }
    }
}

/// Returns true if a text can identify an exchange: it becomes a part of a subject.
pub fn is_exchange_id(text: &str) -> bool {
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=80).contains(&text.len()) && text.bytes().all(is_safe)
}

fn exchange_subject(channel: &RunId, exchange: &str, part: ExchangePart) -> String {
    format!("{KEPT_SUBJECT}.{channel}.{exchange}.{}", part.as_str())
}

/// Returns `None` for a message that no version of this program writes.
fn parse_message(message: crate::tail_message::TailMessage) -> Option<ExchangeMessage> {
    let mut tokens = message.subject.rsplit('.');
    let part = match tokens.next()? {
        "answer" => ExchangePart::Answer,
        "feedback" => ExchangePart::Feedback,
        _ => return None,
    };
    let exchange = tokens.next()?.to_owned();
    let (sequence, time_ms) = (message.sequence, message.time_ms);
    // The server leaves an empty message where one has expired.
    let payload = Some(message.payload).filter(|payload| !payload.is_empty())?;
    Some(ExchangeMessage { sequence, time_ms, exchange, part, payload })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_leaves_the_oldest_messages_out() {
        let mut newest = NewestMessages::new(10);
        for (sequence, bytes) in [(1, 4), (2, 4), (3, 4), (4, 1)] {
            newest.add(ExchangeMessage {
                sequence,
                time_ms: 0,
                exchange: "e".into(),
                part: ExchangePart::Answer,
                payload: vec![0; bytes].into(),
            });
        }
        let kept: Vec<u64> = newest.messages.iter().map(|message| message.sequence).collect();
        assert_eq!((kept, newest.bytes), (vec![2, 3, 4], 9));
    }
}
