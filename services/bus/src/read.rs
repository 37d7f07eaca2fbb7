//! Reading the log: the last fact of a subject, from the stream's leader.

use std::time::Duration;

use async_nats::jetstream::{message::StreamMessage, stream::RawMessage};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;
use wire::{FactError, Record, with_authors};

use crate::{
    Bus, STREAM,
    backoff::Backoff,
    request::{RequestError, code},
};

/// The servers of a cluster that lost one agree on another leader within 8 s.
const FAILOVER: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("read the log at {what}")]
    Request {
        what: String,
        #[source]
        source: RequestError,
    },
    #[error(
        "read the log at {what}: the stream {STREAM} does not exist; start the coordinator (B110)"
    )]
    NoStream { what: String },
    #[error("read the log: entry {sequence} on {subject} is not a fact we understand (B113)")]
    Unreadable {
        sequence: u64,
        subject: String,
        #[source]
        source: FactError,
    },
    #[error(
        "the log ends at {last}, before {after} which was read already: it was lost or replaced; \
         start again from its beginning (B110)"
    )]
    WentBack { after: u64, last: u64 },
}

#[derive(Deserialize)]
struct MessageAnswer {
    message: RawMessage,
}

#[derive(Deserialize)]
struct StreamAnswer {
    config: StreamLimits,
    state: StreamState,
}

#[derive(Deserialize)]
struct StreamLimits {
    max_bytes: i64,
}

#[derive(Deserialize)]
struct StreamState {
    last_seq: u64,
    messages: u64,
    bytes: u64,
    #[serde(default)]
    num_deleted: u64,
    /// Only when asked for.
    #[serde(default)]
    deleted: Vec<u64>,
}

/// Entries that were in the log and are no longer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lost {
    pub count: u64,
    /// Which, as far as one answer can name them.
    pub sequences: Vec<u64>,
}

/// How much of the log's room is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub facts: u64,
    pub bytes: u64,
    /// `None`: as far as the disk goes.
    pub limit: Option<u64>,
}

/// An answer naming more would not fit the server's payload limit.
const LOST_NAMED_MAX: u64 = 50_000;

impl Bus {
    /// The fact that stands at a place, whoever wrote it; under a subject with wildcards, the last
    /// of them.
    ///
    /// # Errors
    /// When the log cannot be read, or what it holds there is not a fact.
    pub async fn get(&self, subject: &str) -> Result<Option<Record>, ReadError> {
        if !subject.contains(['*', '>']) {
            let first = patiently(|| self.first_message(STREAM, subject)).await;
            let first = first.map_err(|source| read_error(subject.to_owned(), source))?;
            return first.map(stored).transpose();
        }
        let mut last = None;
        // A log that was begun before its fleet was closed holds both kinds.
        let mut places = with_authors(subject);
        if self.shared.author.is_none() {
            places.truncate(1);
        }
        for place in places {
            let message = patiently(|| self.last_message(STREAM, &place)).await;
            let found = message.map_err(|source| read_error(subject.to_owned(), source))?;
            last = found.into_iter().chain(last).max_by_key(|message| message.sequence);
        }
        last.map(stored).transpose()
    }

    /// What stands at a place, as the stream's leader has it: whatever comes later in the same
    /// place, by somebody who did not ask for it to be empty, is nothing.
    pub(crate) async fn first_message(
        &self,
        stream: &str,
        place: &str,
    ) -> Result<Option<StreamMessage>, RequestError> {
        let mut first: Option<StreamMessage> = None;
        let mut places = with_authors(place);
        if self.shared.author.is_none() {
            places.truncate(1);
        }
        for place in places {
            let body = json!({ "seq": 1, "next_by_subj": place });
            let found = self.message(stream, &body).await?;
            first = found.into_iter().chain(first).min_by_key(|message| message.sequence);
        }
        Ok(first)
    }

    /// The position of the newest fact; 0 when there is none yet.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn last_sequence(&self) -> Result<u64, ReadError> {
        patiently(|| self.stream_end(STREAM))
            .await
            .map_err(|source| read_error("its end".to_owned(), source))
    }

    /// How full the log is.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn usage(&self) -> Result<Usage, ReadError> {
        let verb = format!("STREAM.INFO.{STREAM}");
        let answer: Result<StreamAnswer, _> = patiently(|| self.api(&verb, &())).await;
        let StreamAnswer { config, state } =
            answer.map_err(|source| read_error("its size".to_owned(), source))?;
        let limit = u64::try_from(config.max_bytes).ok().filter(|limit| *limit > 0);
        Ok(Usage { facts: state.messages, bytes: state.bytes, limit })
    }

    /// What the log itself says is missing between its first entry and its last.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn lost(&self) -> Result<Lost, ReadError> {
        let info = async |details: bool| {
            let verb = format!("STREAM.INFO.{STREAM}");
            let body = json!({ "deleted_details": details });
            let answer: Result<StreamAnswer, _> = patiently(|| self.api(&verb, &body)).await;
            answer.map_err(|source| read_error("what is missing".to_owned(), source))
        };
        let count = info(false).await?.state.num_deleted;
        if count == 0 || count > LOST_NAMED_MAX {
            return Ok(Lost { count, sequences: Vec::new() });
        }
        let StreamState { num_deleted: count, deleted: sequences, .. } = info(true).await?.state;
        Ok(Lost { count, sequences })
    }

    /// The last message of a subject in a stream, as its leader has it.
    pub(crate) async fn last_message(
        &self,
        stream: &str,
        subject: &str,
    ) -> Result<Option<StreamMessage>, RequestError> {
        self.message(stream, &json!({ "last_by_subj": subject })).await
    }

    pub(crate) async fn message(
        &self,
        stream: &str,
        which: &serde_json::Value,
    ) -> Result<Option<StreamMessage>, RequestError> {
        let verb = format!("STREAM.MSG.GET.{stream}");
        match self.api::<MessageAnswer>(&verb, which).await {
            Ok(answer) => answer
                .message
                .try_into()
                .map(Some)
                .map_err(|error| RequestError::Malformed { detail: format!("{error}") }),
            Err(error) if error.is_code(code::NO_MESSAGE) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The position of its last message, and how many it has.
    pub(crate) async fn stream_extent(&self, stream: &str) -> Result<(u64, u64), RequestError> {
        let answer: StreamAnswer = self.api(&format!("STREAM.INFO.{stream}"), &()).await?;
        Ok((answer.state.last_seq, answer.state.messages))
    }

    pub(crate) async fn stream_end(&self, stream: &str) -> Result<u64, RequestError> {
        let answer: StreamAnswer = self.api(&format!("STREAM.INFO.{stream}"), &()).await?;
        Ok(answer.state.last_seq)
    }
}

/// Repeats what fails in a way that passes, until a cluster that lost a server goes on.
pub(crate) async fn patiently<T, F>(mut read: impl FnMut() -> F) -> Result<T, RequestError>
where
    F: Future<Output = Result<T, RequestError>>,
{
    let mut backoff = Backoff::until(Instant::now() + FAILOVER);
    loop {
        match read().await {
            Err(error) if error.is_transient() && backoff.wait().await => {}
            done => return done,
        }
    }
}

pub(crate) fn read_error(what: String, source: RequestError) -> ReadError {
    if source.is_code(code::STREAM_NOT_FOUND) {
        return ReadError::NoStream { what };
    }
    ReadError::Request { what, source }
}

fn stored(message: StreamMessage) -> Result<Record, ReadError> {
    let time_ms = milliseconds(message.time.unix_timestamp_nanos());
    let (sequence, subject) = (message.sequence, message.subject.to_string());
    record(sequence, time_ms, &subject, &message.payload).map_err(|source| ReadError::Unreadable {
        sequence,
        subject,
        source,
    })
}

pub(crate) fn record(
    sequence: u64,
    time_ms: u64,
    subject: &str,
    payload: &[u8],
) -> Result<Record, FactError> {
    Record::read(sequence, time_ms, subject, payload)
}

pub(crate) fn milliseconds(nanoseconds: i128) -> u64 {
    u64::try_from(nanoseconds / 1_000_000).unwrap_or(0)
}
