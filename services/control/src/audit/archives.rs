//! Facts that the log has let go of, put back in their places from the archives.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Seek, Write},
};

use ::store::{GetError, Store};
use flate2::read::GzDecoder;
use futures::TryStreamExt;
use tokio::sync::mpsc;
use wire::{Record, v1};

use super::{Reading, explain};

/// What `services/coordinator` calls it.
const FACTS: &str = "facts.jsonl.gz";

/// Downloads of one archive that came damaged.
const TRIES_MAX: u32 = 4;

/// Records read ahead of the audit.
const READ_AHEAD: usize = 16;

/// A longer line is no fact: the bus would not have taken it.
const LINE_BYTES_MAX: u64 = 64 << 20;

type Lines = mpsc::Receiver<Result<Record, String>>;

/// The archives of a run, each read from its cycle's plan on.
pub(super) struct Archives {
    closed: BTreeMap<u32, v1::Archived>,
    open: BTreeMap<u32, Open>,
    /// Cycles whose archive said something wrong.
    failed: Vec<(u32, String)>,
}

struct Open {
    lines: Lines,
    next: Option<Record>,
    read: u64,
    expected: u64,
}

impl Archives {
    pub(super) fn new(archived: BTreeMap<u32, v1::Archived>) -> Self {
        Self { closed: archived, open: BTreeMap::new(), failed: Vec::new() }
    }

    /// Begins to read a cycle's archive, if it has one, behind a position of the log.
    pub(super) async fn open(
        &mut self,
        cycle: u32,
        after: u64,
        store: Option<&Store>,
        reading: &mut Reading,
    ) {
        let Some(archived) = self.closed.remove(&cycle) else { return };
        let Some(store) = store else {
            return reading.unread(cycle, "the store was not looked at");
        };
        match fetch(store, &archived).await {
            Ok(lines) => {
                let open = Open { lines, next: None, read: 0, expected: archived.records };
                self.open.insert(cycle, open);
                self.refill(cycle).await;
                // What came before was taken from the log itself.
                while self.take(|next| next <= after).await.is_some() {}
            }
            Err(why) => reading.unread(cycle, &why),
        }
    }

    /// The next archived record below a position of the log.
    pub(super) async fn before(&mut self, sequence: u64) -> Option<Record> {
        self.take(|next| next < sequence).await
    }

    /// The archived record at a position of the log.
    pub(super) async fn standing_at(&mut self, sequence: u64) -> Option<Record> {
        self.take(|next| next == sequence).await
    }

    async fn take(&mut self, fits: impl Fn(u64) -> bool) -> Option<Record> {
        let next = |open: &Open| open.next.as_ref().map(|record| record.sequence);
        let nexts = self.open.iter().filter_map(|(cycle, open)| Some((next(open)?, *cycle)));
        let (_, cycle) = nexts.filter(|(sequence, _)| fits(*sequence)).min()?;
        let record = self.open.get_mut(&cycle)?.next.take();
        self.refill(cycle).await;
        record
    }

    async fn refill(&mut self, cycle: u32) {
        let Some(open) = self.open.get_mut(&cycle) else { return };
        match open.lines.recv().await {
            Some(Ok(record)) => {
                open.read += 1;
                open.next = Some(record);
            }
            Some(Err(why)) => {
                self.failed.push((cycle, why));
                self.open.remove(&cycle);
            }
            None => {
                if open.read != open.expected {
                    let why = format!("{} records, not the {} it says", open.read, open.expected);
                    self.failed.push((cycle, why));
                }
                self.open.remove(&cycle);
            }
        }
    }

    /// What went wrong on the way.
    pub(super) fn close(self, reading: &mut Reading) {
        self.failed.iter().for_each(|(cycle, why)| reading.unread(*cycle, why));
    }
}

/// Verifies the whole file before a line of it counts. What is wrong with the object itself is
/// found again when the store is looked at.
async fn fetch(store: &Store, archived: &v1::Archived) -> Result<Lines, String> {
    let tree = archived.tree.as_ref().ok_or("its fact names no tree")?;
    let file = download(store, tree).await?;
    let (send, lines) = mpsc::channel(READ_AHEAD);
    tokio::task::spawn_blocking(move || read_lines(file, &send));
    Ok(lines)
}

/// Again when it came damaged: that may have happened on the way.
async fn download(store: &Store, tree: &v1::Tree) -> Result<std::fs::File, String> {
    let mut tries = 1;
    loop {
        match download_once(store, tree).await? {
            Err(GetError::Corrupt { same_size: true, .. }) if tries < TRIES_MAX => tries += 1,
            got => return got.map_err(|error| explain(&error)),
        }
    }
}

async fn download_once(
    store: &Store,
    tree: &v1::Tree,
) -> Result<Result<std::fs::File, GetError>, String> {
    let told = |error: std::io::Error| format!("keep it here: {error}");
    let mut file = tempfile::tempfile().map_err(told)?;
    let mut chunks = match store.read_file(tree, FACTS).await {
        Ok(chunks) => chunks,
        Err(error) => return Ok(Err(error)),
    };
    loop {
        match chunks.try_next().await {
            Ok(Some(chunk)) => file.write_all(&chunk).map_err(told)?,
            Ok(None) => break,
            Err(error) => return Ok(Err(error)),
        }
    }
    file.rewind().map_err(told)?;
    Ok(Ok(file))
}

/// Until nobody listens, or a line is wrong.
fn read_lines(file: std::fs::File, send: &mpsc::Sender<Result<Record, String>>) {
    let mut text = BufReader::new(GzDecoder::new(BufReader::new(file)));
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = std::io::Read::take(&mut text, LINE_BYTES_MAX).read_until(b'\n', &mut line);
        let record = match read {
            Ok(0) => return,
            Ok(_) => Record::from_line(&line).map_err(|error| explain(&error)),
            Err(error) => Err(error.to_string()),
        };
        let over = record.is_err();
        if send.blocking_send(record).is_err() || over {
            return;
        }
    }
}
