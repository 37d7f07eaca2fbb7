//! Follows the log: all facts of some subjects, in order, stored and new ones.

use futures::{FutureExt, StreamExt, future, future::BoxFuture, stream, stream::BoxStream};
use wire::{FactError, Record, expand_author_filters};

use crate::{
    Bus, ReadError, STREAM,
    point_read::{self, read_error},
    stream_tail::{StreamTail, TailError, TailItem, TailMessage},
};

/// Most messages that are parsed together.
const CHUNK_MAX: usize = 64;
/// Number of messages from which a separate task parses them.
const SPAWN_CHUNK_MIN: usize = 8;

/// Most parsing tasks at the same time; messages are received meanwhile.
const PARSE_TASKS_MAX: usize = 4;

/// An item of [`Bus::follow_facts`].
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are records")]
pub enum LogEvent {
    /// A fact.
    Record(Record),
    /// An entry that is not a valid fact; the stream continues after it.
    Unreadable { sequence: u64, subject: String, error: FactError },
    /// All entries that existed at the start have been delivered. Sent once.
    CaughtUp,
}

impl Bus {
    /// Yields every fact that matches one of `filters` (an empty list matches all), by any author,
    /// with a sequence above `after`, in order and without gaps. The stream never ends; it
    /// reconnects and resumes by itself.
    ///
    /// It yields an error if the log was unreachable for 30 s, is missing, denies access, or ends
    /// before the position already read (`WentBack`). Polling again retries.
    pub fn follow_facts(
        &self,
        filters: Vec<String>,
        after: u64,
    ) -> BoxStream<'static, Result<LogEvent, ReadError>> {
        let filters = filters.iter().flat_map(|filter| expand_author_filters(filter)).collect();
        let tail = StreamTail::new(self, STREAM.to_owned(), filters, after);
        stream::unfold(tail, |mut tail| async move {
            let item = tail.next().await;
            Some((item, tail))
        })
        .ready_chunks(CHUNK_MAX)
        .map(parse_chunk)
        .buffered(PARSE_TASKS_MAX)
        .flat_map(stream::iter)
        .boxed()
    }
}

/// Parses messages that arrived together: a few at once, many in a task.
fn parse_chunk(
    items: Vec<Result<TailItem, TailError>>,
) -> BoxFuture<'static, Vec<Result<LogEvent, ReadError>>> {
    let few = items.len() < SPAWN_CHUNK_MIN;
    let read = move || {
        let each = items.into_iter();
        each.map(|item| item.map(to_log_event).map_err(follow_error)).collect()
    };
    if few {
        return future::ready(read()).boxed();
    }
    let task = tokio::spawn(async move { read() });
    async move {
        match task.await {
            Ok(read) => read,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime is shutting down, and with it the follower.
            Err(_) => future::pending().await,
        }
    }
    .boxed()
}

/// Converts an item of the stream into an event.
fn to_log_event(item: TailItem) -> LogEvent {
    let message = match item {
        TailItem::Message(message) => message,
        TailItem::CaughtUp => return LogEvent::CaughtUp,
    };
    let TailMessage { sequence, time_ms, subject, payload } = message;
    match point_read::parse_record(sequence, time_ms, &subject, &payload) {
        Ok(record) => LogEvent::Record(record),
        Err(error) => LogEvent::Unreadable { sequence, subject, error },
    }
}

/// Converts an error of the stream into a [`ReadError`].
fn follow_error(error: TailError) -> ReadError {
    match error {
        TailError::Request(source) => read_error("a position being followed".to_owned(), source),
        TailError::WentBack { after, last } => ReadError::WentBack { after, last },
    }
}
