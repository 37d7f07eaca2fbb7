//! Facts that the log has let go of, put back in their places from the archives.

use std::collections::BTreeMap;

use ::store::Store;
use wire::{Record, v1};

use super::Reading;
use crate::archive::{self, Lines};

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
        match archive::facts(store, &archived).await {
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
