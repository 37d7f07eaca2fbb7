//! The choice of the adapters in a soup: those that improve the likelihood of held-out completions
//! (arXiv:2203.05482).

use std::path::Path;

use agent::JobError;
use engine::SoupChoice;
use wire::v1;

use super::{TrainingPart, start_weights::MergeStart};
use crate::{messages::TrainSlice, training_process::TrainingDir};

/// A merge of the chosen adapters only.
pub(super) struct ChosenSoup {
    pub merge: v1::train_order::Merge,
    /// In nats per token; 0 if there was nothing to choose.
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
        let alone = merge.deltas.len() == 1 && merge.outer == 1;
        if alone {
            return Ok(ChosenSoup { merge: merge.clone(), heldout_nll: 0.0 });
        }
        let mut choice = SoupChoice::new(merge.deltas.len());
        while let Some(slices) = choice.next_candidate() {
            self.write_merged(&merge_of(&slices), start, (&adapter, &velocity)).await?;
            choice.record_score(self.score_adapter(&adapter, text.path(), scratch).await?);
        }
        let (mut kept, mut heldout_nll) = choice.chosen();
        if merge.outer > 1 {
            // The start is a soup already.
            self.write_merged(&merge_of(&[]), start, (&adapter, &velocity)).await?;
            let before = self.score_adapter(&adapter, text.path(), scratch).await?;
            if before < heldout_nll {
                (kept, heldout_nll) = (&[], before);
            }
        }
        self.kept_worker.end_worker();
        // Likelihoods that are not finite say nothing of the soup.
        let heldout_nll = if heldout_nll.is_finite() { heldout_nll } else { f64::MAX };
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
        // An adapter that cannot be scored is the worst.
        Ok(self.run_worker(slice, scratch).await?.heldout_nll.unwrap_or(f64::INFINITY))
    }
}
