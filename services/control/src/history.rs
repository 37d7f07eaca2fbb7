//! What a run was made of, wherever it is by now: in the log, or in its cycles' archives.

use bus::ReadError;
use cycle::Run;
use wire::{Body, Place, Record, RunId, v1};

use crate::{Control, StoreError, archive};

/// What the log keeps of a run for good.
const SMALL: [&str; 10] = [
    "spec",
    "control.*",
    "selection.*",
    "order.train.>",
    "checkpoint.>",
    "eval.>",
    "failure.>",
    "quarantine.>",
    "cycle.*.*",
    "done",
];

#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    #[error("there is no run {0}; `flotilla run list` shows which there are (R101)")]
    Unknown(RunId),
    #[error("{0:?} is not the name of a run (R115)")]
    NoRun(String),
    #[error("run {0} is no raft run: it selects nothing (R107)")]
    SelectsNothing(RunId),
    #[error("cycle {cycle} of run {run} has not selected yet (R107)")]
    NotYet { run: RunId, cycle: u32 },
    #[error("the archive of cycle {cycle}: {why} (R107)")]
    Archive { cycle: u32, why: String },
    #[error("put the page together: {0} (X101)")]
    Page(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("read the log")]
    Read(#[from] ReadError),
}

impl Control {
    /// A run as it was when a cycle was about to select. `records`: all of it but its samples.
    pub(crate) async fn before_selection(
        &self,
        id: &RunId,
        cycle: u32,
        mut records: Vec<Record>,
    ) -> Result<Run, HistoryError> {
        let spec = records.first().ok_or_else(|| HistoryError::Unknown(id.clone()))?;
        let mut run = Run::start(spec).ok_or_else(|| HistoryError::Unknown(id.clone()))?;
        if run.raft().is_none() {
            return Err(HistoryError::SelectsNothing(id.clone()));
        }
        let selected = |record: &Record| matches!(record.fact.subject.place, Place::Selection { cycle: found } if found == cycle);
        let end = records.iter().position(selected);
        let end = end.ok_or_else(|| HistoryError::NotYet { run: id.clone(), cycle })?;
        let archived = |cycle: u32| {
            records.iter().find_map(|record| match &record.fact.body {
                Body::Archived(archived) if archived.cycle == cycle => Some(archived.clone()),
                _ => None,
            })
        };
        // What was shown of a policy in the cycle before is compared with what is shown now.
        let proven = run.raft().and_then(|raft| raft.proof.as_ref()).is_some_and(|it| it.canary);
        let first = if proven { cycle.saturating_sub(1) } else { cycle };
        let mut bulky = Vec::new();
        for cycle in first..=cycle {
            bulky.extend(self.bulky(id, cycle, archived(cycle)).await?);
        }
        let before = records[end].sequence;
        records.truncate(end);
        records.extend(bulky);
        records.sort_by_key(|record| record.sequence);
        records.dedup_by_key(|record| record.sequence);
        let then = records.iter().take_while(|record| record.sequence < before);
        then.for_each(|record| run.fold(record));
        Ok(run)
    }

    /// All facts of a run but orders, samples and verdicts.
    pub(crate) async fn run_without_samples(
        &self,
        id: &RunId,
    ) -> Result<Vec<Record>, HistoryError> {
        let filters = SMALL.map(|kind| format!("flotilla.{id}.{kind}"));
        Ok(self.read_all(filters.to_vec()).await?)
    }

    /// A cycle's orders, samples and verdicts, wherever they are by now.
    /// The facts of a cycle that its archive has.
    ///
    /// # Errors
    /// When the archive cannot be read.
    pub async fn recall(&self, archived: &v1::Archived) -> Result<Vec<Record>, HistoryError> {
        let cycle = archived.cycle;
        let failed = |why: String| HistoryError::Archive { cycle, why };
        let mut lines = archive::facts(self.store().await?, archived).await.map_err(failed)?;
        let mut records = Vec::new();
        while let Some(line) = lines.recv().await {
            records.push(line.map_err(failed)?);
        }
        Ok(records)
    }

    pub(crate) async fn bulky(
        &self,
        id: &RunId,
        cycle: u32,
        archived: Option<v1::Archived>,
    ) -> Result<Vec<Record>, HistoryError> {
        match archived {
            Some(archived) => self.recall(&archived).await,
            None => Ok(self.read_all(Place::bulky_filters(id, cycle).to_vec()).await?),
        }
    }
}
