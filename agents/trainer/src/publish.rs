//! Publishes the steps that the worker saves, in order, while training continues.

use std::path::{Path, PathBuf};

use agent::JobError;
use store::TreePlace;
use tokio::sync::mpsc;
use wire::{FactBody, FactKey, v1};

use crate::{
    lineage::{self, TrainingLineage},
    messages::{CHECKPOINT_DIR, STATE_DIR, TrainStep},
    training_check::{self, StepStats},
    weight_delta::InitialWeights,
};

pub(crate) struct SavedStep {
    pub step: TrainStep,
    pub directory: PathBuf,
    pub stats: StepStats,
}

/// Publishes saved steps until the channel closes. `start` are the initial weights, `previous` is
/// the checkpoint from which the training resumed. Removes the state of each checkpoint that a
/// newer one replaces. Fails when a step did not train, cannot be published, or does not continue
/// the log's checkpoints.
pub(crate) async fn publish_all(
    lineage: TrainingLineage<'_>,
    start: InitialWeights,
    mut previous: Option<v1::Checkpoint>,
    mut saved: mpsc::Receiver<SavedStep>,
) -> Result<(), JobError> {
    while let Some(saved) = saved.recv().await {
        let published = publish_step(lineage, &start, saved).await?;
        match &previous {
            Some(previous) if previous.step < published.step => {
                lineage.remove_state_of(previous).await;
            }
            // Another trainer may have published steps in between.
            _ => lineage.remove_state_before(published.step).await,
        }
        previous = Some(published);
    }
    Ok(())
}

/// Publishes a saved step: checks it, uploads its files and its state, then writes the fact, so
/// that the files of an announced checkpoint always exist. A step that did not train is not
/// announced.
async fn publish_step(
    lineage: TrainingLineage<'_>,
    start: &InitialWeights,
    saved: SavedStep,
) -> Result<v1::Checkpoint, JobError> {
    let SavedStep { step, directory, stats } = saved;
    let TrainingLineage { job, order, engine: family } = lineage;
    let weight_change =
        training_check::check_saved_step(&directory.join(CHECKPOINT_DIR), start, &step, &stats)
            .await?;
    let place = TreePlace::for_checkpoint(&job.run, order.cycle, step.step);
    let about = lineage::checkpoint_metadata(order, family, step.step, step.steps);
    let files = directory.join(CHECKPOINT_DIR);
    let tree = job.cache.publish_tree(&job.store, &files, &place, about).await?;
    let state = publish_state(lineage, &step, &directory, &tree).await?;
    let checkpoint = v1::Checkpoint {
        engine: stats.engine,
        skipped: stats.skipped,
        weight_change,
        ..checkpoint_fact(lineage, &step, tree, state)
    };
    let place = FactKey::Checkpoint { cycle: order.cycle, step: step.step };
    job.write_result(place, FactBody::Checkpoint(checkpoint.clone())).await?;
    lineage.check_accepted(&checkpoint).await?;
    // The files are in the store now; local ones only use space.
    let _ = tokio::fs::remove_dir_all(&directory).await;
    Ok(checkpoint)
}

/// The last step has no state, because no training resumes from it.
async fn publish_state(
    TrainingLineage { job, order, .. }: TrainingLineage<'_>,
    step: &TrainStep,
    directory: &Path,
    checkpoint: &v1::Tree,
) -> Result<Option<v1::Tree>, JobError> {
    if step.step == step.steps {
        return Ok(None);
    }
    let place = TreePlace::for_resume_state(&job.run, order.cycle, step.step);
    let about = lineage::state_metadata(checkpoint);
    Ok(Some(job.store.publish_tree(&directory.join(STATE_DIR), &place, about).await?))
}

/// Builds the fact of a checkpoint, without the values of the statistics.
fn checkpoint_fact(
    TrainingLineage { job, order, .. }: TrainingLineage<'_>,
    step: &TrainStep,
    tree: v1::Tree,
    resume: Option<v1::Tree>,
) -> v1::Checkpoint {
    let base = order.base.as_ref().and_then(|base| base.tree.clone());
    let is_adapter = lineage::trains_adapter(order);
    let content =
        if is_adapter { v1::checkpoint::Content::Adapter } else { v1::checkpoint::Content::Model };
    v1::Checkpoint {
        run: job.run.to_string(),
        cycle: order.cycle,
        step: step.step,
        steps: step.steps,
        r#final: step.step == step.steps,
        content: content.into(),
        tree: Some(tree),
        parent: order.adapter.clone().or_else(|| base.clone()),
        base: base.filter(|_| is_adapter),
        loss: step.loss,
        learning_rate: step.learning_rate,
        tokens: step.tokens,
        wall_s: step.wall_s,
        agent: job.agent.clone(),
        resume,
        grad_norm: step.grad_norm,
        grad_norm_max: step.grad_norm_max,
        trained_tokens: step.trained_tokens,
        packing: step.packing,
        canary: step.canary.clone(),
        weighting: step.weighting.clone(),
        peak_memory_bytes: step.peak_memory_bytes,
        ..Default::default()
    }
}
