//! Reading a stream in order without a consumer, which members of a closed fleet may not make:
//! what is there is fetched, filter by filter, and merged; what comes later is heard of, and then
//! fetched. How far a filter is read is the leader's word; whole batches may be a follower's.

use std::{collections::VecDeque, time::Duration};

use futures::{StreamExt, stream};
use serde_json::json;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::{Bus, STREAM, batch, read::milliseconds, request::RequestError, tail::Message};

/// What is said is heard before it is stored: after a word, the log is looked at again and again
/// for so long, and so soon at first.
const HUNT: Duration = Duration::from_secs(1);
const HUNT_FIRST: Duration = Duration::from_millis(5);
const HUNT_CAP: Duration = Duration::from_millis(200);
/// A word can be lost.
const POLL: Duration = Duration::from_secs(10);

pub(crate) struct Reading {
    bus: Bus,
    stream: String,
    cursors: Vec<Cursor>,
    /// The stream's last position, as its leader had it of late.
    end: u64,
    /// Counts words and reconnects.
    heard: watch::Receiver<u64>,
    hunt: Option<Hunt>,
    _listening: JoinSet<()>,
}

/// One filter.
struct Cursor {
    filter: String,
    /// Fetched, and not yet told.
    ahead: VecDeque<Message>,
    /// Everything up to here was told or is ahead.
    through: u64,
}

/// Something was said and is not found yet.
struct Hunt {
    until: Instant,
    pause: Duration,
}

#[derive(Debug)]
pub(crate) enum Step {
    Message(Message),
    /// Everything up to here was told.
    Through(u64),
}

impl Reading {
    /// Begins behind a position.
    pub(crate) async fn open(
        bus: &Bus,
        stream: &str,
        filters: &[String],
        position: u64,
    ) -> Result<Self, RequestError> {
        let everything = [">".to_owned()];
        let filters = if filters.is_empty() { &everything } else { filters };
        let cursor = |filter: &String| Cursor {
            filter: filter.clone(),
            ahead: VecDeque::new(),
            through: position,
        };
        let (heard, listening) = listen(bus, stream, filters).await?;
        // Answered by a server that knows by then what we listen to.
        let end = bus.stream_end(stream).await?;
        Ok(Self {
            bus: bus.clone(),
            stream: stream.to_owned(),
            cursors: filters.iter().map(cursor).collect(),
            end,
            heard,
            hunt: None,
            _listening: listening,
        })
    }

    /// What comes next in the stream; at its end, `Through` once and then nothing until there is
    /// more. Cancel-safe.
    pub(crate) async fn next(&mut self, position: u64) -> Result<Step, RequestError> {
        loop {
            let head = self.head();
            let up_to = head.map_or(self.end, |(_, sequence)| sequence);
            let behind = |cursor: &Cursor| cursor.ahead.is_empty() && cursor.through < up_to;
            if let Some(behind) = self.cursors.iter().position(behind) {
                self.fetch(behind).await?;
                continue;
            }
            if let Some((first, _)) = head
                && let Some(message) = self.cursors[first].ahead.pop_front()
            {
                // There may be another behind it that was said at once with it.
                if let Some(hunt) = &mut self.hunt {
                    hunt.pause = HUNT_FIRST;
                }
                return Ok(Step::Message(message));
            }
            if self.end > position {
                return Ok(Step::Through(self.end));
            }
            self.wait().await;
            self.end = self.bus.stream_end(&self.stream).await?;
            if self.end < position {
                // Whoever begins anew finds out.
                return Err(RequestError::Interrupted);
            }
        }
    }

    /// The cursor with the earliest message that is ahead, and where that is.
    fn head(&self) -> Option<(usize, u64)> {
        let heads = self.cursors.iter().enumerate();
        let heads = heads.filter_map(|(n, cursor)| Some((n, cursor.ahead.front()?.sequence)));
        heads.min_by_key(|(_, sequence)| *sequence)
    }

    /// Goes on with one filter: by a message and what follows it, or to the end there was.
    async fn fetch(&mut self, number: usize) -> Result<(), RequestError> {
        let Cursor { filter, through, .. } = &self.cursors[number];
        let (from, filter) = (through + 1, filter.clone());
        let body = json!({ "seq": from, "next_by_subj": filter });
        let end = self.end;
        // What is beyond is for later: other filters were not looked at so far.
        let next = self.bus.message(&self.stream, &body).await?;
        let Some(next) = next.filter(|next| next.sequence <= end) else {
            self.cursors[number].through = end;
            return Ok(());
        };
        let mut found = vec![next];
        if found[0].sequence < end {
            let from = found[0].sequence + 1;
            let more = batch::fetch(&self.bus, &self.stream, &filter, from).await?;
            found.extend(more.into_iter().take_while(|message| message.sequence <= end));
        }
        let cursor = &mut self.cursors[number];
        cursor.through = found.last().map_or(cursor.through, |last| last.sequence);
        cursor.ahead.extend(found.into_iter().map(|message| Message {
            sequence: message.sequence,
            time_ms: milliseconds(message.time.unix_timestamp_nanos()),
            subject: message.subject.to_string(),
            payload: message.payload,
        }));
        Ok(())
    }

    /// Until something was said, or may have been.
    async fn wait(&mut self) {
        if let Some(hunt) = &mut self.hunt {
            if Instant::now() < hunt.until {
                sleep(hunt.pause).await;
                hunt.pause = HUNT_CAP.min(hunt.pause * 2);
                return;
            }
            self.hunt = None;
        }
        // A change is a word; an error or no answer in time is a look for want of one.
        if let Ok(Ok(())) = timeout(POLL, self.heard.changed()).await {
            self.hunt = Some(Hunt { until: Instant::now() + HUNT, pause: HUNT_FIRST });
        }
    }
}

/// Hears of messages without keeping any; and of new connections, for what was said before them.
async fn listen(
    bus: &Bus,
    stream: &str,
    filters: &[String],
) -> Result<(watch::Receiver<u64>, JoinSet<()>), RequestError> {
    let (count, heard) = watch::channel(0);
    let mut listening = JoinSet::new();
    // Facts are heard by everybody, what is written to buckets by nobody.
    let filters = if stream == STREAM { filters } else { &[] };
    let mut subscribers = Vec::new();
    for filter in filters {
        let subject = if filter == ">" { "flotilla.>" } else { filter };
        let subscriber = bus.shared.client.subscribe(subject.to_owned()).await;
        subscribers.push(subscriber.map_err(|_| RequestError::Closed)?);
    }
    let mut generation = bus.shared.connection.generation.subscribe();
    generation.borrow_and_update();
    listening.spawn(async move {
        let mut said = stream::select_all(subscribers);
        loop {
            tokio::select! {
                Some(_) = said.next() => {}
                Ok(()) = generation.changed() => {}
                else => return,
            }
            count.send_modify(|count| *count += 1);
        }
    });
    Ok((heard, listening))
}
