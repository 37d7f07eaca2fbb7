//! The choice of the adapters in a soup: those that improve the likelihood of held-out completions
//! (arXiv:2203.05482).

use std::path::Path;

use agent::JobError;
use anyhow::anyhow;
use engine::SoupChoice;
use wire::v1;

use super::{TrainingPart, start_weights::MergeStart};
use crate::{messages::TrainSlice, training_process::TrainingDir};

/// A merge of the chosen adapters only.
pub(super) struct ChosenSoup {
    pub merge: v1::train_order::Merge,
    /// In nats per token.
    pub heldout_nll: f64,
}

impl TrainingPart<'_> {
    /// Chooses adapters by the likelihood of `heldout`.
    pub(super) async fn choose_soup(
        self,
        merge: &v1::train_order::Merge,
        start: &MergeStart,
        heldout: &v1::Blob,
        scratch: &TrainingDir,
    ) -> Result<ChosenSoup, JobError> {
        let Self { job, .. } = self;
        let text = job.cache.fetch_blob(&job.store, heldout).await?;
        let (adapter, velocity) = (scratch.0.join("candidate"), scratch.0.join("unused"));
        let merge_of = |slices: &[usize]| {
            let deltas = slices.iter().map(|slice| merge.deltas[*slice].clone()).collect();
            v1::train_order::Merge { deltas, ..merge.clone() }
        };
        let mut choice = SoupChoice::new(merge.deltas.len());
        while let Some(slices) = choice.next_candidate() {
            self.write_merged(&merge_of(&slices), start, (&adapter, &velocity)).await?;
            choice.record_score(self.score_adapter(&adapter, text.path(), scratch).await?);
        }
        let (kept, heldout_nll) = choice.chosen();
        Ok(ChosenSoup { merge: merge_of(kept), heldout_nll })
    }

    async fn score_adapter(
        self,
        adapter: &Path,
        heldout: &Path,
        scratch: &TrainingDir,
    ) -> Result<f64, JobError> {
        let slice = TrainSlice {
            start: Some(adapter.to_owned()),
            heldout: Some(heldout.to_owned()),
            ..TrainSlice::default()
        };
        let scored = self.run_worker(slice, scratch).await?.heldout_nll;
        scored.ok_or_else(|| {
            JobError::retryable_failure(anyhow!("the worker gave no likelihood (E112)"))
        })
    }
}
