//! Reads a stream in order without a consumer, because members of a closed fleet must not create
//! one.
//!
//! Stored messages are fetched filter by filter and merged. New messages are noticed by subscribing
//! to their subjects, and then fetched. The leader decides how far a filter has been read; whole
//! batches may come from a follower.

use std::{collections::VecDeque, time::Duration};

use futures::{StreamExt, stream};
use serde_json::json;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::{
    Bus, LOG_STREAM, batch_get, point_read::nanos_to_millis, request_error::RequestError,
    tail_message::TailMessage,
};

/// A message is announced before it is stored, so polls right after the notification may not find
/// it.
const BURST_DURATION: Duration = Duration::from_secs(1);
/// First pause between these polls; it doubles each time.
const BURST_PAUSE_FIRST: Duration = Duration::from_millis(5);
/// Longest pause between these polls.
const BURST_PAUSE_MAX: Duration = Duration::from_millis(200);
/// A notification can be lost.
const IDLE_POLL: Duration = Duration::from_secs(10);

/// Merges one cursor for each filter by position. A message is yielded once all filters have been
/// read up to its position. At the end of the stream the reader waits for a notification, a new
/// connection or 10 s, then asks the leader for the new end.
pub(crate) struct OrderedReader {
    bus: Bus,
    stream: String,
    cursors: Vec<FilterCursor>,
    /// Last position of the stream, as its leader last reported it.
    end: u64,
    /// Counts notifications and reconnects.
    notifications: watch::Receiver<u64>,
    burst: Option<PollBurst>,
    _listeners: JoinSet<()>,
}

struct FilterCursor {
    filter: String,
    /// Fetched and not yet yielded.
    buffered: VecDeque<TailMessage>,
    /// All messages up to this position were yielded or are buffered.
    through: u64,
}

/// Frequent polls after a notification whose message was not found yet.
struct PollBurst {
    until: Instant,
    pause: Duration,
}

#[derive(Debug)]
pub(crate) enum ReaderStep {
    Message(TailMessage),
    /// All messages up to this position were yielded.
    Through(u64),
}

impl OrderedReader {
    /// Starts after `position`. No filters means all messages.
    pub(crate) async fn open(
        bus: &Bus,
        stream: &str,
        filters: &[String],
        position: u64,
    ) -> Result<Self, RequestError> {
        let everything = [">".to_owned()];
        let filters = if filters.is_empty() { &everything } else { filters };
        let cursor = |filter: &String| FilterCursor {
            filter: filter.clone(),
            buffered: VecDeque::new(),
            through: position,
        };
        let (notifications, listeners) = subscribe_activity(bus, stream, filters).await?;
        // The server that answers this request has already processed the subscriptions.
        let end = bus.stream_end(stream).await?;
        Ok(Self {
            bus: bus.clone(),
            stream: stream.to_owned(),
            cursors: filters.iter().map(cursor).collect(),
            end,
            notifications,
            burst: None,
            _listeners: listeners,
        })
    }

    /// Returns `Through` once at the end of the stream, then waits for more. Cancel-safe.
    pub(crate) async fn next(&mut self, position: u64) -> Result<ReaderStep, RequestError> {
        loop {
            let head = self.earliest_buffered();
            let up_to = head.map_or(self.end, |(_, sequence)| sequence);
            let behind =
                |cursor: &FilterCursor| cursor.buffered.is_empty() && cursor.through < up_to;
            if let Some(behind) = self.cursors.iter().position(behind) {
                self.fetch_filter(behind).await?;
                continue;
            }
            if let Some((first, _)) = head
                && let Some(message) = self.cursors[first].buffered.pop_front()
            {
                // Another message may have been announced together with this one: poll quickly
                // again.
                if let Some(burst) = &mut self.burst {
                    burst.pause = BURST_PAUSE_FIRST;
                }
                return Ok(ReaderStep::Message(message));
            }
            if self.end > position {
                return Ok(ReaderStep::Through(self.end));
            }
            self.wait_for_activity().await;
            self.end = self.bus.stream_end(&self.stream).await?;
            if self.end < position {
                // The stream was replaced; the caller notices when it starts over.
                return Err(RequestError::Interrupted);
            }
        }
    }

    fn earliest_buffered(&self) -> Option<(usize, u64)> {
        let heads = self.cursors.iter().enumerate();
        let heads = heads.filter_map(|(n, cursor)| Some((n, cursor.buffered.front()?.sequence)));
        heads.min_by_key(|(_, sequence)| *sequence)
    }

    /// Advances one cursor by its next message and a batch after it, or to the known end.
    async fn fetch_filter(&mut self, number: usize) -> Result<(), RequestError> {
        let FilterCursor { filter, through, .. } = &self.cursors[number];
        let (from, filter) = (through + 1, filter.clone());
        let body = json!({ "seq": from, "next_by_subj": filter });
        let end = self.end;
        // Leave messages beyond the known end for later: other filters were not read that far.
        let next = self.bus.get_message(&self.stream, &body).await?;
        let Some(next) = next.filter(|next| next.sequence <= end) else {
            self.cursors[number].through = end;
            return Ok(());
        };
        let mut found = vec![next];
        if found[0].sequence < end {
            let from = found[0].sequence + 1;
            let more = batch_get::fetch_batch(&self.bus, &self.stream, &filter, from).await?;
            found.extend(more.into_iter().take_while(|message| message.sequence <= end));
        }
        let cursor = &mut self.cursors[number];
        cursor.through = found.last().map_or(cursor.through, |last| last.sequence);
        cursor.buffered.extend(found.into_iter().map(|message| TailMessage {
            sequence: message.sequence,
            time_ms: nanos_to_millis(message.time.unix_timestamp_nanos()),
            subject: message.subject.to_string(),
            payload: message.payload,
        }));
        Ok(())
    }

    /// Waits for a pause of the current burst, a notification, or 10 s.
    async fn wait_for_activity(&mut self) {
        if let Some(burst) = &mut self.burst {
            if Instant::now() < burst.until {
                sleep(burst.pause).await;
                burst.pause = BURST_PAUSE_MAX.min(burst.pause * 2);
                return;
            }
            self.burst = None;
        }
        // A change is a notification; an error or a timeout leads to a single poll.
        if let Ok(Ok(())) = timeout(IDLE_POLL, self.notifications.changed()).await {
            self.burst = Some(PollBurst {
                until: Instant::now() + BURST_DURATION,
                pause: BURST_PAUSE_FIRST,
            });
        }
    }
}

/// Counts messages of the filters without keeping them, and new connections, because notifications
/// may have been lost before.
async fn subscribe_activity(
    bus: &Bus,
    stream: &str,
    filters: &[String],
) -> Result<(watch::Receiver<u64>, JoinSet<()>), RequestError> {
    let (count, notifications) = watch::channel(0);
    let mut listeners = JoinSet::new();
    // Facts are published on subjects that members may subscribe to; writes to buckets are not.
    let filters = if stream == LOG_STREAM { filters } else { &[] };
    let mut subscribers = Vec::new();
    for filter in filters {
        let subject = if filter == ">" { "flotilla.>" } else { filter };
        let subscriber = bus.shared.client.subscribe(subject.to_owned()).await;
        subscribers.push(subscriber.map_err(|_| RequestError::Closed)?);
    }
    let mut generation = bus.shared.connection.generation.subscribe();
    generation.borrow_and_update();
    listeners.spawn(async move {
        let mut messages = stream::select_all(subscribers);
        loop {
            tokio::select! {
                Some(_) = messages.next() => {}
                Ok(()) = generation.changed() => {}
                else => return,
            }
            count.send_modify(|count| *count += 1);
        }
    });
    Ok((notifications, listeners))
}
