//! The facts of a run, read from the log or, for archived cycles, from their archives.

use bus::ReadError;
use cycle::Run;
use wire::{FactBody, FactKey, Record, RunId, v1};

use crate::{
    FleetControl, RunError, StoreAccessError,
    archived_facts::{ArchiveFailure, open_facts},
};

/// Facts that the log keeps after cycles are archived, as subject patterns.
const RETAINED_FACTS: [&str; 16] = [
    "spec",
    "watched",
    "control.*",
    "selection.*",
    "order.train.>",
    "slices.*.*",
    "delta.>",
    "close.*.*",
    "merge.*.*",
    "checkpoint.>",
    "eval.>",
    "failure.>",
    "declined.>",
    "quarantine.>",
    "cycle.*.*",
    "done",
];

/// The reason why the history of a run cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    #[error("there is no run {0}; `flotilla run list` lists all (R101)")]
    Unknown(RunId),
    #[error("{0:?} is not the name of a run (R115)")]
    NoRun(String),
    #[error("run {0} is not a raft run: it draws and selects no samples (R107)")]
    SelectsNothing(RunId),
    #[error("cycle {cycle} of run {run} has not selected yet (R107)")]
    NotYet { run: RunId, cycle: u32 },
    #[error("run {run} has no cycle {cycle}; its last one is {last} (R107)")]
    NoCycle { run: RunId, cycle: u32, last: u32 },
    #[error("the archive of cycle {cycle}: {why} (R107)")]
    Archive { cycle: u32, why: String, is_transient: bool },
    #[error("put the page together: {0} (X101)")]
    Page(String),
    #[error(transparent)]
    Store(#[from] StoreAccessError),
    #[error("read the log")]
    Read(#[from] ReadError),
    #[error(transparent)]
    Run(#[from] RunError),
}

impl HistoryError {
    /// Returns true if the same call may succeed later: the log or the store is the reason.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Store(_) | Self::Read(_) => true,
            Self::Archive { is_transient, .. } => *is_transient,
            Self::Run(error) => error.is_transient(),
            Self::Unknown(_)
            | Self::NoRun(_)
            | Self::SelectsNothing(_)
            | Self::NotYet { .. }
            | Self::NoCycle { .. }
            | Self::Page(_) => false,
        }
    }
}

/// Fails if a run never has this cycle.
pub(crate) fn check_cycle(
    run: &RunId,
    cycle: u32,
    raft: &v1::spec::Raft,
) -> Result<(), HistoryError> {
    let (run, last) = (run.clone(), raft.cycles);
    if cycle > last { Err(HistoryError::NoCycle { run, cycle, last }) } else { Ok(()) }
}

impl FleetControl {
    /// Returns a run in the state before a cycle's selection, with all its facts except orders,
    /// samples and verdicts. If the spec enables the canary, the bulky facts of the previous cycle
    /// are included too. Fails if the run makes no selections, or the cycle has not selected.
    pub(crate) async fn run_before_selection(
        &self,
        id: &RunId,
        cycle: u32,
        mut records: Vec<Record>,
    ) -> Result<Run, HistoryError> {
        let spec = records.first().ok_or_else(|| HistoryError::Unknown(id.clone()))?;
        let mut run = Run::start(spec).ok_or_else(|| HistoryError::Unknown(id.clone()))?;
        let Some(raft) = run.raft_spec() else {
            return Err(HistoryError::SelectsNothing(id.clone()));
        };
        check_cycle(id, cycle, raft)?;
        if cycle < run.first_cycle {
            let owner = self.cycle_owner(id, cycle).await?;
            let records = self.records_without_samples(&owner).await?;
            return Box::pin(self.run_before_selection(&owner, cycle, records)).await;
        }
        let selected = |record: &Record| matches!(record.fact.subject.key, FactKey::Selection { cycle: found } if found == cycle);
        let end = records.iter().position(selected);
        let end = end.ok_or_else(|| HistoryError::NotYet { run: id.clone(), cycle })?;
        let archived = |cycle: u32| {
            records.iter().find_map(|record| match &record.fact.body {
                FactBody::Archived(archived) if archived.cycle == cycle => Some(archived.clone()),
                _ => None,
            })
        };
        // The canary results of the previous cycle are compared with those of this cycle.
        let proven =
            run.raft_spec().and_then(|raft| raft.proof.as_ref()).is_some_and(|it| it.canary);
        let first = if proven { cycle.saturating_sub(1) } else { cycle };
        let mut bulky = Vec::new();
        for cycle in first..=cycle {
            bulky.extend(self.read_bulky_facts(id, cycle, archived(cycle)).await?);
        }
        let before = records[end].sequence;
        records.truncate(end);
        records.extend(bulky);
        records.sort_by_key(|record| record.sequence);
        records.dedup_by_key(|record| record.sequence);
        let then = records.iter().take_while(|record| record.sequence < before);
        then.for_each(|record| run.fold_record(record));
        Ok(run)
    }

    /// Returns the number of tokens that were drawn for the training of a cycle.
    ///
    /// # Errors
    /// When the log or the cycle's archive cannot be read.
    pub async fn count_drawn_tokens(&self, id: &RunId, cycle: u32) -> Result<u64, HistoryError> {
        let is_archive = |record: Record| match record.fact.body {
            FactBody::Archived(archived) => Some(archived),
            _ => None,
        };
        let id = &self.cycle_owner(id, cycle).await?;
        let filter = format!("flotilla.{id}.cycle.{cycle}.archived");
        let archived = self.read_records(vec![filter]).await?.into_iter().find_map(is_archive);
        let facts = self.read_bulky_facts(id, cycle, archived).await?;
        let drawn = facts.iter().filter_map(|record| match &record.fact.body {
            FactBody::Samples(samples) if samples.purpose() == v1::Purpose::Train => Some(samples),
            _ => None,
        });
        let tokens = drawn.flat_map(|samples| &samples.samples).map(|it| u64::from(it.tokens));
        Ok(tokens.sum())
    }

    pub(crate) async fn records_without_samples(
        &self,
        id: &RunId,
    ) -> Result<Vec<Record>, ReadError> {
        let filters = RETAINED_FACTS.map(|kind| format!("flotilla.{id}.{kind}"));
        self.read_records(filters.to_vec()).await
    }

    /// Returns all facts in the archive of a cycle.
    pub async fn read_archive(&self, archived: &v1::Archived) -> Result<Vec<Record>, HistoryError> {
        let cycle = archived.cycle;
        let failed = |ArchiveFailure { why, is_transient }| HistoryError::Archive {
            cycle,
            why,
            is_transient,
        };
        let damaged = |why| failed(ArchiveFailure { why, is_transient: false });
        let mut lines = open_facts(self.open_store().await?, archived).await.map_err(failed)?;
        let mut records = Vec::new();
        while let Some(line) = lines.recv().await {
            records.push(line.map_err(damaged)?);
        }
        Ok(records)
    }

    /// Reads the bulky facts from the archive if `archived` is given, else from the
    /// log.
    pub(crate) async fn read_bulky_facts(
        &self,
        id: &RunId,
        cycle: u32,
        archived: Option<v1::Archived>,
    ) -> Result<Vec<Record>, HistoryError> {
        match archived {
            Some(archived) => self.read_archive(&archived).await,
            None => Ok(self.read_records(FactKey::bulky_filters(id, cycle).to_vec()).await?),
        }
    }
}
