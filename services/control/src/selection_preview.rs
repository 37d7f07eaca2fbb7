//! A preview of a selection by other rules, from the samples of a cycle that has selected.

use std::collections::{BTreeMap, BTreeSet};

use cycle::{PreferencePair, SelectionOutcome, pair_samples, preview_selection};
use serde::Serialize;
use spec::{FieldError, SelectionSpec};
use wire::RunId;

use crate::{FleetControl, HistoryError};

/// The selection of a cycle, compared with a selection by other rules.
#[derive(Debug, Clone, Serialize)]
pub struct SelectionComparison {
    pub run: String,
    pub cycle: u32,
    /// Planned samples of the cycle.
    pub considered: u32,
    pub was: SelectionSummary,
    pub would: SelectionSummary,
    /// Samples that both selections keep.
    pub both: usize,
    /// Dataset that the other rules produce, as JSON lines.
    #[serde(skip)]
    pub dataset: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SelectionSummary {
    pub kept: usize,
    /// Different prompts among the kept samples.
    pub prompts: usize,
    /// Tokens of the kept samples.
    pub tokens: u64,
    /// Mean over the kept samples, if any.
    pub reward: Option<f64>,
    /// Number of dropped samples by reason.
    pub dropped: BTreeMap<String, u32>,
}

/// The reason why a selection cannot be previewed.
#[derive(Debug, thiserror::Error)]
pub enum PreviewError {
    #[error(transparent)]
    History(#[from] HistoryError),
    #[error(transparent)]
    Field(#[from] FieldError),
}

impl FleetControl {
    /// Selects again from the samples of a cycle, by other rules. Fails if the cycle has not
    /// selected or the rules are invalid.
    pub async fn preview_selection(
        &self,
        id: &RunId,
        cycle: u32,
        rules: &SelectionSpec,
    ) -> Result<SelectionComparison, PreviewError> {
        let records = self.records_without_samples(id).await.map_err(HistoryError::from)?;
        let run = self.run_before_selection(id, cycle, records).await?;
        let raft = run.raft_spec().ok_or_else(|| HistoryError::SelectsNothing(id.clone()))?;
        rules.check_fields("policy", raft.cycles)?;
        let rules = rules.to_proto_at(cycle, raft.cycles);
        let not_yet = || HistoryError::NotYet { run: id.clone(), cycle };
        let was = preview_selection(&run, cycle, None).ok_or_else(not_yet)?;
        let would = preview_selection(&run, cycle, Some(&rules)).ok_or_else(not_yet)?;
        let names = |outcome: &SelectionOutcome| -> BTreeSet<(String, u32)> {
            outcome.kept.iter().map(|kept| (kept.prompt_id.clone(), kept.index)).collect()
        };
        Ok(SelectionComparison {
            run: id.to_string(),
            cycle,
            considered: was.considered,
            both: names(&was).intersection(&names(&would)).count(),
            was: SelectionSummary::from_outcome(&was),
            would: SelectionSummary::from_outcome(&would),
            dataset: would.dataset,
        })
    }
}

impl FleetControl {
    /// Pairs the training samples of a cycle by their rewards. Fails if the cycle has not selected.
    pub async fn pair_samples(
        &self,
        id: &RunId,
        cycle: u32,
    ) -> Result<Vec<PreferencePair>, HistoryError> {
        let records = self.records_without_samples(id).await.map_err(HistoryError::from)?;
        let run = self.run_before_selection(id, cycle, records).await?;
        run.raft_spec().ok_or_else(|| HistoryError::SelectsNothing(id.clone()))?;
        pair_samples(&run, cycle).ok_or_else(|| HistoryError::NotYet { run: id.clone(), cycle })
    }
}

impl SelectionSummary {
    fn from_outcome(outcome: &SelectionOutcome) -> Self {
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
