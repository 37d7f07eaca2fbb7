//! Following the log: every fact of some subjects, in order, past and future.

use futures::{FutureExt, StreamExt, future, future::BoxFuture, stream, stream::BoxStream};
use wire::{FactError, Record, with_authors};

use crate::{
    Bus, ReadError, STREAM,
    read::{self, read_error},
    tail::{Item, Message, Tail, TailError},
};

/// What came together is read together, by a task of its own from so many messages on.
const TOGETHER_MAX: usize = 64;
const TOGETHER_MIN: usize = 8;

/// Such tasks at once; meanwhile more is received.
const TASKS_MAX: usize = 4;

/// What following the log yields.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are records")]
pub enum Followed {
    Record(Record),
    /// An entry that is not a fact we understand; following goes on behind it.
    Unreadable {
        sequence: u64,
        subject: String,
        error: FactError,
    },
    /// Everything that existed at the start has been delivered. Comes once.
    CaughtUp,
}

impl Bus {
    /// Every fact that matches one of `filters` (none: all), whoever wrote it, with a sequence above `after`, in
    /// order and without gaps; never ends. Reconnects and resumes by itself. An error is
    /// yielded when the log has been unreachable for half a minute, is missing, denied, or lost
    /// facts (`WentBack`); polling on tries again.
    pub fn follow(
        &self,
        filters: Vec<String>,
        after: u64,
    ) -> BoxStream<'static, Result<Followed, ReadError>> {
        let filters = filters.iter().flat_map(|filter| with_authors(filter)).collect();
        let tail = Tail::new(self, STREAM.to_owned(), filters, after);
        stream::unfold(tail, |mut tail| async move {
            let item = tail.next().await;
            Some((item, tail))
        })
        .ready_chunks(TOGETHER_MAX)
        .map(read_together)
        .buffered(TASKS_MAX)
        .flat_map(stream::iter)
        .boxed()
    }
}

fn read_together(
    items: Vec<Result<Item, TailError>>,
) -> BoxFuture<'static, Vec<Result<Followed, ReadError>>> {
    let few = items.len() < TOGETHER_MIN;
    let read = move || {
        let each = items.into_iter();
        each.map(|item| item.map(followed).map_err(follow_error)).collect()
    };
    if few {
        return future::ready(read()).boxed();
    }
    let task = tokio::spawn(async move { read() });
    async move {
        match task.await {
            Ok(read) => read,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime ends, and with it whoever follows.
            Err(_) => future::pending().await,
        }
    }
    .boxed()
}

fn followed(item: Item) -> Followed {
    let message = match item {
        Item::Message(message) => message,
        Item::CaughtUp => return Followed::CaughtUp,
    };
    let Message { sequence, time_ms, subject, payload } = message;
    match read::record(sequence, time_ms, &subject, &payload) {
        Ok(record) => Followed::Record(record),
        Err(error) => Followed::Unreadable { sequence, subject, error },
    }
}

fn follow_error(error: TailError) -> ReadError {
    match error {
        TailError::Request(source) => read_error("a position being followed".to_owned(), source),
        TailError::WentBack { after, last } => ReadError::WentBack { after, last },
    }
}
