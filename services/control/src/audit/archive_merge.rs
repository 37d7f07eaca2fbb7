//! Merges archived facts back into the log at their original positions.

use std::collections::BTreeMap;

use ::store::Store;
use wire::{Record, v1};

use super::AuditState;
use crate::archived_facts::{self, FactStream};

/// Archives by cycle, each read from its cycle's plan onward.
pub(super) struct ArchiveMerge {
    unopened: BTreeMap<u32, v1::Archived>,
    opened: BTreeMap<u32, OpenArchive>,
    /// Cycles whose archive could not be read completely, each with the reason.
    failures: Vec<(u32, String)>,
}

struct OpenArchive {
    lines: FactStream,
    next: Option<Record>,
    records_read: u64,
    /// Number in the `archived` fact.
    records_expected: u64,
}

impl ArchiveMerge {
    pub(super) fn new(archived: BTreeMap<u32, v1::Archived>) -> Self {
        Self { unopened: archived, opened: BTreeMap::new(), failures: Vec::new() }
    }

    /// Skips the records up to the log position `after`.
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
            Err(failure) => {
                let tree = archived.tree.unwrap_or_default();
                match store.find_removal(&tree).await {
                    Ok(Some(_)) => reading.add_removed(cycle),
                    _ => reading.add_unreadable(cycle, &failure.why),
                }
            }
        }
    }

    pub(super) async fn next_before(&mut self, sequence: u64) -> Option<Record> {
        self.take_if(|next| next < sequence).await
    }

    pub(super) async fn take_at(&mut self, sequence: u64) -> Option<Record> {
        self.take_if(|next| next == sequence).await
    }

    /// Takes the record with the lowest log position among the open archives if it `fits`.
    async fn take_if(&mut self, fits: impl Fn(u64) -> bool) -> Option<Record> {
        let next = |open: &OpenArchive| open.next.as_ref().map(|record| record.sequence);
        let nexts = self.opened.iter().filter_map(|(cycle, open)| Some((next(open)?, *cycle)));
        let (_, cycle) = nexts.filter(|(sequence, _)| fits(*sequence)).min()?;
        let record = self.opened.get_mut(&cycle)?.next.take();
        self.read_next(cycle).await;
        record
    }

    /// Closes the archive at its end. Notes a failure if a line is damaged or the number of records
    /// is wrong.
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

    pub(super) fn report_failures(self, reading: &mut AuditState) {
        self.failures.iter().for_each(|(cycle, why)| reading.add_unreadable(*cycle, why));
    }
}
