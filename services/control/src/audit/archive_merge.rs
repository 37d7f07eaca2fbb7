//! Archived facts, merged back into the log at their original positions.

use std::collections::BTreeMap;

use ::store::Store;
use wire::{Record, v1};

use super::AuditState;
use crate::archived_facts::{self, FactStream};

/// The archives of a run. Each one is read from its cycle's plan onward.
pub(super) struct ArchiveMerge {
    /// Archives that have not been opened, by cycle.
    unopened: BTreeMap<u32, v1::Archived>,
    /// Archives that are being read, by cycle.
    opened: BTreeMap<u32, OpenArchive>,
    /// Cycles whose archive could not be read completely, each with the reason.
    failures: Vec<(u32, String)>,
}

/// An archive that is being read.
struct OpenArchive {
    lines: FactStream,
    /// The next record, read ahead.
    next: Option<Record>,
    /// Records that were read.
    records_read: u64,
    /// Records that the `archived` fact announces.
    records_expected: u64,
}

impl ArchiveMerge {
    /// Returns the archives, none of them opened.
    pub(super) fn new(archived: BTreeMap<u32, v1::Archived>) -> Self {
        Self { unopened: archived, opened: BTreeMap::new(), failures: Vec::new() }
    }

    /// Opens the archive of a cycle, if it has one, and skips its records up to the log position
    /// `after`.
    pub(super) async fn open_archive(
        &mut self,
        cycle: u32,
        after: u64,
        store: Option<&Store>,
        reading: &mut AuditState,
    ) {
        let Some(archived) = self.unopened.remove(&cycle) else { return };
        let Some(store) = store else {
            return reading.add_unreadable(cycle, "the store was not looked at");
        };
        match archived_facts::open_facts(store, &archived).await {
            Ok(lines) => {
                let open = OpenArchive {
                    lines,
                    next: None,
                    records_read: 0,
                    records_expected: archived.records,
                };
                self.opened.insert(cycle, open);
                self.read_next(cycle).await;
                // Earlier records were already taken from the log itself.
                while self.take_if(|next| next <= after).await.is_some() {}
            }
            Err(why) => reading.add_unreadable(cycle, &why),
        }
    }

    /// Returns the next archived record below a log position.
    pub(super) async fn next_before(&mut self, sequence: u64) -> Option<Record> {
        self.take_if(|next| next < sequence).await
    }

    /// Returns the archived record at a log position.
    pub(super) async fn take_at(&mut self, sequence: u64) -> Option<Record> {
        self.take_if(|next| next == sequence).await
    }

    /// Takes the open record with the lowest log position among those whose position `fits`.
    async fn take_if(&mut self, fits: impl Fn(u64) -> bool) -> Option<Record> {
        let next = |open: &OpenArchive| open.next.as_ref().map(|record| record.sequence);
        let nexts = self.opened.iter().filter_map(|(cycle, open)| Some((next(open)?, *cycle)));
        let (_, cycle) = nexts.filter(|(sequence, _)| fits(*sequence)).min()?;
        let record = self.opened.get_mut(&cycle)?.next.take();
        self.read_next(cycle).await;
        record
    }

    /// Reads the next record of a cycle's archive. Closes the archive at its end, and notes a
    /// failure if a line is damaged or the number of records is wrong.
    async fn read_next(&mut self, cycle: u32) {
        let Some(open) = self.opened.get_mut(&cycle) else { return };
        match open.lines.recv().await {
            Some(Ok(record)) => {
                open.records_read += 1;
                open.next = Some(record);
            }
            Some(Err(why)) => {
                self.failures.push((cycle, why));
                self.opened.remove(&cycle);
            }
            None => {
                if open.records_read != open.records_expected {
                    let why = format!(
                        "{} records, not the {} it says",
                        open.records_read, open.records_expected
                    );
                    self.failures.push((cycle, why));
                }
                self.opened.remove(&cycle);
            }
        }
    }

    /// Adds the failures to the audit.
    pub(super) fn report_failures(self, reading: &mut AuditState) {
        self.failures.iter().for_each(|(cycle, why)| reading.add_unreadable(*cycle, why));
    }
}
