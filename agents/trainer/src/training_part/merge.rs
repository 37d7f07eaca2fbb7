//! Merges of the slices of an outer step.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use agent::JobError;
use anyhow::{Context, anyhow};
use engine::MergeErrors;
use store::{TreeMetadata, TreePlace};
use wire::{FactBody, FactKey, v1};

use super::TrainingPart;
use crate::{
    lineage,
    messages::{CHECKPOINT_DIR, TrainSlice},
    training_check,
    training_process::TrainingDir,
    weight_delta::InitialWeights,
    worker::NEW_ADAPTER_DIR,
};

/// The longest time for which the removal of merged weights may delay a training.
const REMOVE_LIMIT: Duration = Duration::from_secs(30);

/// The weights of a merge, or its outer optimizer's velocity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MergedFiles {
    Adapter,
    Velocity,
}

/// Returns the error for merged weights, such as `merge 3 of cycle 0`, with another digest here than
/// elsewhere.
pub(super) fn merge_mismatch_error(
    weights: &str,
    ours: &str,
    theirs: &str,
    elsewhere: &str,
) -> JobError {
    JobError::result_differs(anyhow!(
        "{weights} has the digest {ours} here and {theirs} {elsewhere}; one of the two boxes \
         computes wrong: check memory and processor of both (E118)"
    ))
}

/// Fails if an agent has published other bytes for the merged weights: two boxes do not compute
/// alike.
fn check_same_bytes(
    weights: &str,
    [ours, theirs]: [&Option<v1::Tree>; 2],
    agent: &str,
) -> Result<(), JobError> {
    let manifest = |tree: &Option<v1::Tree>| tree.clone().unwrap_or_default().manifest;
    let (ours, theirs) = (manifest(ours), manifest(theirs));
    match ours == theirs {
        true => Ok(()),
        false => Err(merge_mismatch_error(weights, &ours, &theirs, &format!("on {agent}"))),
    }
}

/// Returns true if the canary of a merged checkpoint is scored: that of the final one, if the order
/// asks for it.
pub(crate) fn scores_canary(order: &v1::TrainOrder, due: &v1::Checkpoint) -> bool {
    due.r#final && !order.canary.is_empty()
}

impl TrainingPart<'_> {
    /// Merges the weights of an outer step, or creates the new adapter, and writes the `merge` fact.
    /// A checkpoint that is due is published first.
    pub(crate) async fn merge_deltas(self, merge: &v1::train_order::Merge) -> Result<(), JobError> {
        let Self { job, order, .. } = self;
        let began = Instant::now();
        let name = format!("{}-{}-merge", order.cycle, merge.outer);
        let scratch = TrainingDir::create_for(job, &name)?;
        let (adapter, momentum) = (scratch.0.join("adapter"), scratch.0.join("momentum"));
        let mut soup = None;
        let mut total_steps = 0;
        let MergeErrors { drift, residual } = match merge.outer {
            0 => {
                total_steps = self.create_adapter(&adapter, &scratch).await?;
                MergeErrors::default()
            }
            _ => {
                let start = self.fetch_merge_inputs(merge).await?;
                if let Some(heldout) = &merge.heldout {
                    soup = Some(self.choose_soup(merge, &start, heldout, &scratch).await?);
                }
                let merge = soup.as_ref().map_or(merge, |soup| &soup.merge);
                self.write_merged(merge, &start, (&adapter, &momentum)).await?
            }
        };
        let written = soup.as_ref().map_or(merge, |soup| &soup.merge);
        let tree = self.publish_merged(written, MergedFiles::Adapter, &adapter).await?;
        let momentum = match momentum.exists() {
            true => Some(self.publish_merged(written, MergedFiles::Velocity, &momentum).await?),
            false => None,
        };
        if let Some(checkpoint) = &merge.checkpoint {
            self.publish_checkpoint(checkpoint, &adapter, &scratch).await?;
        }
        let manifest = |tree: Option<&v1::Tree>| tree.map_or("", |tree| &tree.manifest).to_owned();
        let fact = v1::Merge {
            run: job.run.to_string(),
            cycle: order.cycle,
            outer: merge.outer,
            agent: job.agent.clone(),
            start: manifest(merge.start.as_ref()),
            deltas: merge.deltas.iter().map(|delta| manifest(delta.tree.as_ref())).collect(),
            tree: Some(tree),
            momentum,
            drift,
            residual,
            derived: merge.derived,
            kept: soup.iter().flat_map(|it| &it.merge.deltas).map(|delta| delta.slice).collect(),
            heldout_nll: soup.as_ref().map_or(0.0, |soup| soup.heldout_nll),
            total_steps,
            wall_s: began.elapsed().as_secs_f64(),
        };
        let place = FactKey::Merge { cycle: order.cycle, outer: merge.outer };
        job.write_result(place.clone(), FactBody::Merge(fact.clone())).await?;
        self.check_merge(place, &fact).await?;
        self.remove_merged(merge).await;
        Ok(())
    }

    /// Fails if the log has other bytes for the merge. New adapters and different soups are not
    /// compared.
    async fn check_merge(self, place: FactKey, own: &v1::Merge) -> Result<(), JobError> {
        let Some(FactBody::Merge(accepted)) = self.job.read_fact(place).await? else {
            return Ok(());
        };
        // Two boxes may choose different soups if their engines score differently.
        let is_other = own.outer == 0 || own.kept != accepted.kept;
        if is_other {
            return Ok(());
        }
        let v1::Merge { cycle, outer, agent, .. } = &accepted;
        let weights = format!("merge {outer} of cycle {cycle}");
        check_same_bytes(&weights, [&own.tree, &accepted.tree], agent)
    }

    /// Writes the adapter from which all boxes start, as the engine of this box creates it. Returns the
    /// number of steps of the training.
    async fn create_adapter(self, adapter: &Path, scratch: &TrainingDir) -> Result<u32, JobError> {
        let saved = self.run_worker(TrainSlice::default(), scratch).await?;
        let made = scratch.0.join(NEW_ADAPTER_DIR).join(CHECKPOINT_DIR);
        let moved = tokio::fs::rename(&made, adapter).await;
        moved
            .with_context(|| format!("move {}", made.display()))
            .map_err(JobError::retryable_failure)?;
        Ok(saved.begun.steps)
    }

    /// Publishes files of a merge, or only keeps them in the cache if every box derives them.
    async fn publish_merged(
        self,
        merge: &v1::train_order::Merge,
        kind: MergedFiles,
        files: &Path,
    ) -> Result<v1::Tree, JobError> {
        let (place, about) = self.describe_merged(merge, kind);
        match merge.derived {
            true => Ok(self.job.cache.keep_tree(files, &place, about).await?),
            false => self.publish(files, &place, about).await,
        }
    }

    /// Returns the place and the metadata of files of a merge.
    pub(super) fn describe_merged(
        self,
        merge: &v1::train_order::Merge,
        kind: MergedFiles,
    ) -> (TreePlace, TreeMetadata) {
        let Self { job, order, .. } = self;
        let is_velocity = kind == MergedFiles::Velocity;
        let content = if is_velocity { "momentum" } else { "adapter" };
        let about = lineage::merge_metadata(order, content, merge);
        (TreePlace::for_merge(&job.run, order.cycle, merge.outer, is_velocity), about)
    }

    async fn publish(
        self,
        files: &Path,
        place: &TreePlace,
        about: TreeMetadata,
    ) -> Result<v1::Tree, JobError> {
        Ok(self.job.cache.publish_tree(&self.job.store, files, place, about).await?)
    }

    /// Fails if the log has other bytes for the checkpoint. Those of different soups are not compared.
    async fn publish_checkpoint(
        self,
        due: &v1::Checkpoint,
        adapter: &Path,
        scratch: &TrainingDir,
    ) -> Result<(), JobError> {
        let Self { job, order, .. } = self;
        let v1::Checkpoint { step, steps, .. } = *due;
        let initial = match &order.adapter {
            Some(start) => {
                let start = job.cache.fetch_tree(&job.store, start).await?;
                InitialWeights::Files(start.path().to_owned())
            }
            None => InitialWeights::NewAdapter,
        };
        let weight_change = training_check::measure_change(adapter, &initial).await?;
        let canary = match scores_canary(order, due) {
            true => self.score_canary(adapter, scratch).await?,
            false => Vec::new(),
        };
        let about = lineage::checkpoint_metadata(order, lineage::MERGED_ENGINE, step, steps);
        let place = TreePlace::for_checkpoint(&job.run, order.cycle, step);
        let tree = self.publish(adapter, &place, about).await?;
        let checkpoint = v1::Checkpoint {
            tree: Some(tree),
            agent: job.agent.clone(),
            engine: self.config.engine.describe_engine(),
            weight_change,
            canary,
            ..due.clone()
        };
        let place = FactKey::Checkpoint { cycle: order.cycle, step };
        let own = checkpoint.tree.clone();
        job.write_result(place.clone(), FactBody::Checkpoint(checkpoint)).await?;
        match job.read_fact(place).await? {
            Some(FactBody::Checkpoint(accepted)) if !lineage::is_soup(order) => {
                let weights = format!("checkpoint {step} of cycle {}", order.cycle);
                check_same_bytes(&weights, [&own, &accepted.tree], &accepted.agent)
            }
            _ => Ok(()),
        }
    }

    /// Returns the log-probabilities of the order's canary with merged weights. A failure is only
    /// logged: without them, the boxes that sample are still compared with each other.
    async fn score_canary(
        self,
        adapter: &Path,
        scratch: &TrainingDir,
    ) -> Result<Vec<f32>, JobError> {
        let slice =
            TrainSlice { start: Some(adapter.to_owned()), canary: true, ..TrainSlice::default() };
        match self.run_worker(slice, scratch).await {
            Ok(scored) => Ok(scored.canary),
            Err(error @ JobError::Failed { .. }) => {
                tracing::warn!(run = %self.job.run, %error, "no canary of the merged weights");
                Ok(Vec::new())
            }
            Err(stopped) => Err(stopped),
        }
    }

    /// Removes the weights that went into a merge, which nobody needs any more.
    pub(crate) async fn remove_merged(self, merge: &v1::train_order::Merge) {
        self.remove_trees(self.list_merged(merge)).await;
    }

    /// Returns what a merge makes needless. Nothing if its result is not in the store: boxes that
    /// join derive it.
    fn list_merged(self, merge: &v1::train_order::Merge) -> Vec<(TreePlace, v1::Tree)> {
        let Self { job, order, .. } = self;
        let mut removed: Vec<(TreePlace, v1::Tree)> = Vec::new();
        if merge.derived {
            return removed;
        }
        // The starts of later ones were never stored.
        let first = merge.derivation.first().unwrap_or(merge);
        let before = first.outer.saturating_sub(1);
        for (tree, is_momentum) in [(&first.start, false), (&first.momentum, true)] {
            // The adapter that the order names belongs to another cycle.
            let tree = tree.clone().filter(|tree| Some(tree) != order.adapter.as_ref());
            let place = TreePlace::for_merge(&job.run, order.cycle, before, is_momentum);
            removed.extend(tree.map(|tree| (place, tree)));
        }
        for delta in merge.derivation.iter().chain([merge]).flat_map(|merge| &merge.deltas) {
            let place = TreePlace::for_delta(&job.run, order.cycle, delta.outer, delta.slice);
            removed.extend(delta.tree.clone().map(|tree| (place, tree)));
        }
        removed
    }

    /// A failure is only logged.
    pub(super) async fn remove_trees(self, trees: Vec<(TreePlace, v1::Tree)>) {
        let removal = async {
            for (place, tree) in trees {
                if let Err(error) = self.job.store.remove_tree(&place, &tree).await {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::warn!(path = tree.path, error, "could not remove merged weights");
                }
            }
        };
        if tokio::time::timeout(REMOVE_LIMIT, removal).await.is_err() {
            tracing::warn!(
                "merged weights stay in the store: it took longer than {REMOVE_LIMIT:?}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_bytes_of_a_checkpoint_are_refused_by_name() {
        let tree = |manifest: &str| Some(v1::Tree { manifest: manifest.into(), ..<_>::default() });
        let (ours, theirs) = (tree("a"), tree("b"));
        let check = |other| check_same_bytes("checkpoint 5 of cycle 1", [&ours, other], "box-b");
        assert!(check(&ours).is_ok());
        let error = check(&theirs).unwrap_err().to_string();
        for part in ["checkpoint 5 of cycle 1", "the digest a here and b on box-b", "(E118)"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
