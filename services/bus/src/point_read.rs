//! Reads single facts and properties of the log from the stream's leader.

use std::time::Duration;

use async_nats::jetstream::{message::StreamMessage, stream::RawMessage};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;
use wire::{FactError, FactKey, Record, RunId, Subject, expand_author_filters};

use crate::{
    Bus, LOG_STREAM,
    backoff::RetryBackoff,
    request_error::{RequestError, code},
};

/// Servers of a cluster that lost one elect another leader within 8 s.
const FAILOVER_LIMIT: Duration = Duration::from_secs(15);

/// The reason why the log could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("read the log at {what}")]
    Request {
        what: String,
        #[source]
        source: RequestError,
    },
    #[error(
        "read the log at {what}: the stream {LOG_STREAM} does not exist; start the coordinator \
         (B110)"
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
    Truncated { after: u64, last: u64 },
}

#[derive(Deserialize)]
struct MessageAnswer {
    message: RawMessage,
}

#[derive(Deserialize)]
struct StreamInfoAnswer {
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
    /// Positions of the removed entries, if requested.
    #[serde(default)]
    deleted: Vec<u64>,
}

/// Entries that were in the log and are missing now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LostEntries {
    pub count: u64,
    /// Empty if there are more than one answer can list.
    pub sequences: Vec<u64>,
}

/// The size of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogUsage {
    pub facts: u64,
    pub bytes: u64,
    /// `None` if only the disk limits the log.
    pub limit: Option<u64>,
}

/// Positions of more entries would exceed the server's payload limit.
const LOST_LISTED_MAX: u64 = 50_000;

impl Bus {
    /// Returns the fact on a subject, by any author; with wildcards, the newest match.
    pub async fn get_fact(&self, subject: &str) -> Result<Option<Record>, ReadError> {
        if !subject.contains(['*', '>']) {
            let first = with_retries(|| self.read_first_message(LOG_STREAM, subject)).await;
            let first = first.map_err(|source| read_error(subject.to_owned(), source))?;
            return first.map(parse_stored).transpose();
        }
        let mut last = None;
        // A log that was begun before its fleet was closed contains both forms.
        let mut places = expand_author_filters(subject);
        if self.shared.author.is_none() {
            places.truncate(1);
        }
        for place in places {
            let message = with_retries(|| self.read_last_message(LOG_STREAM, &place)).await;
            let found = message.map_err(|source| read_error(subject.to_owned(), source))?;
            last = found.into_iter().chain(last).max_by_key(|message| message.sequence);
        }
        last.map(parse_stored).transpose()
    }

    /// Returns the spec that began a run: the first one of either kind.
    pub async fn find_spec(&self, run: &RunId) -> Result<Option<Record>, ReadError> {
        let spec = self.get_fact(&Subject::new(run, FactKey::Spec).to_string()).await?;
        let watched =
            match self.get_fact(&Subject::new(run, FactKey::WatchedSpec).to_string()).await {
                // What a watcher wrote there does not hide the run's spec.
                Err(ReadError::Unreadable { .. }) if spec.is_some() => None,
                watched => watched?,
            };
        Ok(spec.into_iter().chain(watched).min_by_key(|record| record.sequence))
    }

    /// Returns the first message on a subject, with or without an author, as the stream's leader
    /// has it. A later message there was published without the condition that the subject is empty,
    /// and is ignored.
    pub(crate) async fn read_first_message(
        &self,
        stream: &str,
        place: &str,
    ) -> Result<Option<StreamMessage>, RequestError> {
        let mut first: Option<StreamMessage> = None;
        let mut places = expand_author_filters(place);
        if self.shared.author.is_none() {
            places.truncate(1);
        }
        for place in places {
            let body = json!({ "seq": 1, "next_by_subj": place });
            let found = self.get_message(stream, &body).await?;
            first = found.into_iter().chain(first).min_by_key(|message| message.sequence);
        }
        Ok(first)
    }

    /// Returns the position of the newest fact; 0 for an empty log.
    pub async fn last_sequence(&self) -> Result<u64, ReadError> {
        with_retries(|| self.stream_end(LOG_STREAM))
            .await
            .map_err(|source| read_error("its end".to_owned(), source))
    }

    /// Returns the number of facts, the size and the size limit of the log.
    pub async fn log_usage(&self) -> Result<LogUsage, ReadError> {
        let verb = format!("STREAM.INFO.{LOG_STREAM}");
        let answer: Result<StreamInfoAnswer, _> = with_retries(|| self.call_api(&verb, &())).await;
        let StreamInfoAnswer { config, state } =
            answer.map_err(|source| read_error("its size".to_owned(), source))?;
        let limit = u64::try_from(config.max_bytes).ok().filter(|limit| *limit > 0);
        Ok(LogUsage { facts: state.messages, bytes: state.bytes, limit })
    }

    /// Returns the entries missing between the first and the last one, with positions for up to 50
    /// 000.
    pub async fn find_lost_entries(&self) -> Result<LostEntries, ReadError> {
        let info = async |details: bool| {
            let verb = format!("STREAM.INFO.{LOG_STREAM}");
            let body = json!({ "deleted_details": details });
            let answer: Result<StreamInfoAnswer, _> =
                with_retries(|| self.call_api(&verb, &body)).await;
            answer.map_err(|source| read_error("what is missing".to_owned(), source))
        };
        let count = info(false).await?.state.num_deleted;
        if count == 0 || count > LOST_LISTED_MAX {
            return Ok(LostEntries { count, sequences: Vec::new() });
        }
        let StreamState { num_deleted: count, deleted: sequences, .. } = info(true).await?.state;
        Ok(LostEntries { count, sequences })
    }

    pub(crate) async fn read_last_message(
        &self,
        stream: &str,
        subject: &str,
    ) -> Result<Option<StreamMessage>, RequestError> {
        self.get_message(stream, &json!({ "last_by_subj": subject })).await
    }

    pub(crate) async fn get_message(
        &self,
        stream: &str,
        which: &serde_json::Value,
    ) -> Result<Option<StreamMessage>, RequestError> {
        let verb = format!("STREAM.MSG.GET.{stream}");
        match self.call_api::<MessageAnswer>(&verb, which).await {
            Ok(answer) => answer
                .message
                .try_into()
                .map(Some)
                .map_err(|error| RequestError::Malformed { detail: format!("{error}") }),
            Err(error) if error.has_server_code(code::NO_MESSAGE) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) async fn stream_extent(&self, stream: &str) -> Result<(u64, u64), RequestError> {
        let answer: StreamInfoAnswer = self.call_api(&format!("STREAM.INFO.{stream}"), &()).await?;
        Ok((answer.state.last_seq, answer.state.messages))
    }

    pub(crate) async fn stream_end(&self, stream: &str) -> Result<u64, RequestError> {
        let answer: StreamInfoAnswer = self.call_api(&format!("STREAM.INFO.{stream}"), &()).await?;
        Ok(answer.state.last_seq)
    }
}

/// Repeats a request while its failure is transient, for up to 15 s.
pub(crate) async fn with_retries<T, F>(mut read: impl FnMut() -> F) -> Result<T, RequestError>
where
    F: Future<Output = Result<T, RequestError>>,
{
    let mut backoff = RetryBackoff::with_deadline(Instant::now() + FAILOVER_LIMIT);
    loop {
        match read().await {
            Err(error) if error.is_transient() && backoff.wait().await => {}
            done => return done,
        }
    }
}

/// Recognises a missing stream.
pub(crate) fn read_error(what: String, source: RequestError) -> ReadError {
    if source.has_server_code(code::STREAM_NOT_FOUND) {
        return ReadError::NoStream { what };
    }
    ReadError::Request { what, source }
}

fn parse_stored(message: StreamMessage) -> Result<Record, ReadError> {
    let time_ms = nanos_to_millis(message.time.unix_timestamp_nanos());
    let (sequence, subject) = (message.sequence, message.subject.to_string());
    parse_record(sequence, time_ms, &subject, &message.payload)
        .map_err(|source| ReadError::Unreadable { sequence, subject, source })
}

/// Parses an entry of the log; see [`Record::from_log`].
pub(crate) fn parse_record(
    sequence: u64,
    time_ms: u64,
    subject: &str,
    payload: &[u8],
) -> Result<Record, FactError> {
    Record::from_log(sequence, time_ms, subject, payload)
}

/// Converts to milliseconds; negative times become 0.
pub(crate) fn nanos_to_millis(nanoseconds: i128) -> u64 {
    u64::try_from(nanoseconds / 1_000_000).unwrap_or(0)
}
