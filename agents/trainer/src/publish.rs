//! Publishing what the worker saves, in order, while training goes on.

use std::path::{Path, PathBuf};

use runtime::JobError;
use store::TreePlace;
use tokio::sync::mpsc;
use wire::{Body, Place, v1};

use crate::{
    calls::{CHECKPOINT, STATE, Step},
    change::Start,
    examine::{self, Heard},
    lineage::{self, Lineage},
};

/// A saved step, and where it lies.
pub(crate) struct Saved {
    pub step: Step,
    pub directory: PathBuf,
    pub heard: Heard,
}

/// `start` is what the training began with, `previous` the checkpoint that it went on from.
pub(crate) async fn publish_all(
    lineage: Lineage<'_>,
    start: Start,
    mut previous: Option<v1::Checkpoint>,
    mut saved: mpsc::Receiver<Saved>,
) -> Result<(), JobError> {
    while let Some(saved) = saved.recv().await {
        let published = publish(lineage, &start, saved).await?;
        match &previous {
            Some(previous) if previous.step < published.step => lineage.forget(previous).await,
            // Others may have been here before.
            _ => lineage.forget_before(published.step).await,
        }
        previous = Some(published);
    }
    Ok(())
}

/// Files first, then the fact: a checkpoint that was announced is there, and so is what the
/// optimizer remembers at it. What did not train is not announced.
async fn publish(
    lineage: Lineage<'_>,
    start: &Start,
    saved: Saved,
) -> Result<v1::Checkpoint, JobError> {
    let Saved { step, directory, heard } = saved;
    let Lineage { job, order, engine: family } = lineage;
    let weight_change = examine::saved(&directory.join(CHECKPOINT), start, &step, &heard).await?;
    let place = TreePlace::checkpoint(&job.run, order.cycle, step.step);
    let about = lineage::about(order, family, step.step, step.steps);
    let files = directory.join(CHECKPOINT);
    let tree = job.cache.publish_tree(&job.store, &files, &place, about).await?;
    let state = publish_state(lineage, &step, &directory, &tree).await?;
    let checkpoint = v1::Checkpoint {
        engine: heard.engine,
        skipped: heard.skipped,
        weight_change,
        ..fact(lineage, &step, tree, state)
    };
    let place = Place::Checkpoint { cycle: order.cycle, step: step.step };
    job.write(place, Body::Checkpoint(checkpoint.clone())).await?;
    lineage.check(&checkpoint).await?;
    // It is in the store now; what remains here is only in the way.
    let _ = tokio::fs::remove_dir_all(&directory).await;
    Ok(checkpoint)
}

/// Nobody goes on from the last step.
async fn publish_state(
    Lineage { job, order, .. }: Lineage<'_>,
    step: &Step,
    directory: &Path,
    checkpoint: &v1::Tree,
) -> Result<Option<v1::Tree>, JobError> {
    if step.step == step.steps {
        return Ok(None);
    }
    let place = TreePlace::resume(&job.run, order.cycle, step.step);
    let about = lineage::about_state(checkpoint);
    Ok(Some(job.store.publish_tree(&directory.join(STATE), &place, about).await?))
}

fn fact(
    Lineage { job, order, .. }: Lineage<'_>,
    step: &Step,
    tree: v1::Tree,
    resume: Option<v1::Tree>,
) -> v1::Checkpoint {
    let base = order.base.as_ref().and_then(|base| base.tree.clone());
    let is_adapter = lineage::is_adapter(order);
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
        ..Default::default()
    }
}
