//! Another selection from the samples of a cycle that has selected: what would it have kept?

use std::collections::{BTreeMap, BTreeSet};

use bus::ReadError;
use cycle::{Outcome, Run, select_again};
use serde::Serialize;
use wire::{Body, Place, Record, RunId, v1};

use crate::{Control, FieldError, StoreError, archive, spec::SelectionSpec};

/// What a cycle kept, beside what other rules would have.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    pub run: String,
    pub cycle: u32,
    /// Planned samples of the cycle.
    pub considered: u32,
    pub was: Side,
    pub would: Side,
    /// Samples that both keep.
    pub both: usize,
    /// JSON lines of what would be kept.
    #[serde(skip)]
    pub dataset: Vec<u8>,
}

/// What some rules keep, in figures.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Side {
    pub kept: usize,
    /// Different ones that something was kept of.
    pub prompts: usize,
    /// Of what is kept.
    pub tokens: u64,
    /// Mean of what is kept; none where nothing is.
    pub reward: Option<f64>,
    /// Why the others are not kept.
    pub dropped: BTreeMap<String, u32>,
}

#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    #[error("there is no run {0}; `flotilla run list` shows which there are")]
    Unknown(RunId),
    #[error("run {0} is no raft run: it selects nothing")]
    SelectsNothing(RunId),
    #[error("cycle {cycle} of run {run} has not selected yet")]
    NotYet { run: RunId, cycle: u32 },
    #[error("the archive of cycle {cycle}: {why}")]
    Archive { cycle: u32, why: String },
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("read the log")]
    Read(#[from] ReadError),
}

impl Control {
    /// Selects again from the samples of a cycle, by other rules.
    ///
    /// # Errors
    /// When there is no such cycle, its samples cannot be read, or the rules make no sense.
    pub async fn select(
        &self,
        id: &RunId,
        cycle: u32,
        rules: &SelectionSpec,
    ) -> Result<Comparison, SelectError> {
        let run = self.before_selection(id, cycle).await?;
        let raft = run.raft().ok_or_else(|| SelectError::SelectsNothing(id.clone()))?;
        rules.check("policy", raft.cycles)?;
        let rules = rules.at(cycle, raft.cycles);
        let not_yet = || SelectError::NotYet { run: id.clone(), cycle };
        let was = select_again(&run, cycle, None).ok_or_else(not_yet)?;
        let would = select_again(&run, cycle, Some(&rules)).ok_or_else(not_yet)?;
        let names = |outcome: &Outcome| -> BTreeSet<(String, u32)> {
            outcome.kept.iter().map(|kept| (kept.prompt_id.clone(), kept.index)).collect()
        };
        Ok(Comparison {
            run: id.to_string(),
            cycle,
            considered: was.considered,
            both: names(&was).intersection(&names(&would)).count(),
            was: Side::of(&was),
            would: Side::of(&would),
            dataset: would.dataset,
        })
    }

    /// A run as it was when a cycle was about to select.
    async fn before_selection(&self, id: &RunId, cycle: u32) -> Result<Run, SelectError> {
        let mut records = self.run_without_samples(id).await?;
        let spec = records.first().ok_or_else(|| SelectError::Unknown(id.clone()))?;
        let mut run = Run::start(spec).ok_or_else(|| SelectError::Unknown(id.clone()))?;
        if run.raft().is_none() {
            return Err(SelectError::SelectsNothing(id.clone()));
        }
        let selected = |record: &Record| matches!(record.fact.subject.place, Place::Selection { cycle: found } if found == cycle);
        let end = records.iter().position(selected);
        let end = end.ok_or_else(|| SelectError::NotYet { run: id.clone(), cycle })?;
        let archived = records.iter().find_map(|record| match &record.fact.body {
            Body::Archived(archived) if archived.cycle == cycle => Some(archived.clone()),
            _ => None,
        });
        let before = records[end].sequence;
        records.truncate(end);
        records.extend(self.bulky(id, cycle, archived).await?);
        records.sort_by_key(|record| record.sequence);
        records.dedup_by_key(|record| record.sequence);
        let then = records.iter().take_while(|record| record.sequence < before);
        then.for_each(|record| run.fold(record));
        Ok(run)
    }

    /// All facts of a run but orders, samples and verdicts.
    async fn run_without_samples(&self, id: &RunId) -> Result<Vec<Record>, ReadError> {
        let filters = ["spec", "control.*", "cycle.*.plan", "selection.*", "order.train.>"];
        let more = ["checkpoint.>", "eval.>", "failure.>", "cycle.*.done", "cycle.*.archived"];
        let filters = filters.into_iter().chain(more);
        self.read_all(filters.map(|kind| format!("flotilla.{id}.{kind}")).collect()).await
    }

    /// A cycle's orders, samples and verdicts, wherever they are by now.
    async fn bulky(
        &self,
        id: &RunId,
        cycle: u32,
        archived: Option<v1::Archived>,
    ) -> Result<Vec<Record>, SelectError> {
        let Some(archived) = archived else {
            return Ok(self.read_all(Place::bulky_filters(id, cycle).to_vec()).await?);
        };
        let failed = |why: String| SelectError::Archive { cycle, why };
        let mut lines = archive::facts(self.store().await?, &archived).await.map_err(failed)?;
        let mut records = Vec::new();
        while let Some(line) = lines.recv().await {
            records.push(line.map_err(failed)?);
        }
        Ok(records)
    }
}

impl Side {
    fn of(outcome: &Outcome) -> Self {
        let kept = &outcome.kept;
        let prompts: BTreeSet<&str> = kept.iter().map(|kept| kept.prompt_id.as_str()).collect();
        let sum: f64 = kept.iter().map(|kept| kept.reward).sum();
        let count = u32::try_from(kept.len()).unwrap_or(u32::MAX);
        Self {
            kept: kept.len(),
            prompts: prompts.len(),
            tokens: kept.iter().map(|kept| u64::from(kept.tokens)).sum(),
            reward: (count > 0).then(|| sum / f64::from(count)),
            dropped: outcome.dropped.clone(),
        }
    }
}
