//! Follows the log: all facts of some subjects, in order, stored and new ones.

use futures::{FutureExt, StreamExt, future, future::BoxFuture, stream, stream::BoxStream};
use wire::{FactError, Record, expand_author_filters};

use crate::{
    Bus, LOG_STREAM, ReadError,
    point_read::{self, read_error},
    stream_tail::{StreamTail, TailError, TailItem},
    tail_message::TailMessage,
};

const CHUNK_MAX: usize = 64;
/// From this number of messages on, a separate task parses them.
const SPAWN_CHUNK_MIN: usize = 8;

/// Messages are received meanwhile.
const PARSE_TASKS_MAX: usize = 4;

/// An item of [`Bus::follow_facts`].
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are records")]
pub enum LogEvent {
    Record(Record),
    /// An entry that is not a valid fact; the stream continues.
    Unreadable {
        sequence: u64,
        subject: String,
        error: FactError,
    },
    /// All entries that existed at the start have been yielded. Sent once.
    CaughtUp,
}

impl Bus {
    /// Yields every fact, by any author, that matches one of `filters` (none: all) with a sequence
    /// above `after`, in order and without gaps. The stream never ends; it reconnects and resumes.
    ///
    /// It yields an error if the log was unreachable for 30 s, is missing, denies access, or ends
    /// before the position already read (`Truncated`). Polling again retries.
    pub fn follow_facts(
        &self,
        filters: Vec<String>,
        after: u64,
    ) -> BoxStream<'static, Result<LogEvent, ReadError>> {
        let filters = filters.iter().flat_map(|filter| expand_author_filters(filter)).collect();
        let tail = StreamTail::new(self, LOG_STREAM.to_owned(), filters, after);
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

/// Parses a few messages at once, many in a task.
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

fn follow_error(error: TailError) -> ReadError {
    match error {
        TailError::Request(source) => read_error("a position being followed".to_owned(), source),
        TailError::Truncated { after, last } => ReadError::Truncated { after, last },
    }
}
