//! Another selection from the samples of a cycle that has selected: what would it have kept?

use std::collections::{BTreeMap, BTreeSet};

use cycle::{Outcome, select_again};
use serde::Serialize;
use wire::RunId;

use crate::{Control, FieldError, HistoryError, spec::SelectionSpec};

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
    #[error(transparent)]
    History(#[from] HistoryError),
    #[error(transparent)]
    Field(#[from] FieldError),
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
        let records = self.run_without_samples(id).await?;
        let run = self.before_selection(id, cycle, records).await?;
        let raft = run.raft().ok_or_else(|| HistoryError::SelectsNothing(id.clone()))?;
        rules.check("policy", raft.cycles)?;
        let rules = rules.at(cycle, raft.cycles);
        let not_yet = || HistoryError::NotYet { run: id.clone(), cycle };
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
