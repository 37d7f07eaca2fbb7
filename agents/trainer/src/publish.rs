//! Publishing what the worker saves, in order, while training goes on.

use std::path::{Path, PathBuf};

use runtime::JobError;
use store::TreePlace;
use tokio::sync::mpsc;
use wire::{Body, Place, v1};

use crate::{
    calls::{CHECKPOINT, STATE, Step},
    lineage::{self, Lineage},
};

/// A saved step, and where it lies.
pub(crate) struct Saved {
    pub step: Step,
    pub directory: PathBuf,
    /// What trained it, with its versions.
    pub engine: String,
}

/// `previous` is the checkpoint that training went on from.
pub(crate) async fn publish_all(
    lineage: Lineage<'_>,
    mut previous: Option<v1::Checkpoint>,
    mut saved: mpsc::Receiver<Saved>,
) -> Result<(), JobError> {
    while let Some(saved) = saved.recv().await {
        let published = publish(lineage, saved).await?;
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
/// optimizer remembers at it.
async fn publish(lineage: Lineage<'_>, saved: Saved) -> Result<v1::Checkpoint, JobError> {
    let Saved { step, directory, engine } = saved;
    let Lineage { job, order, engine: family } = lineage;
    let place = TreePlace::checkpoint(&job.run, order.cycle, step.step);
    let about = lineage::about(order, family, step.step, step.steps);
    let tree = job.store.publish_tree(&directory.join(CHECKPOINT), &place, about).await?;
    let state = publish_state(lineage, &step, &directory, &tree).await?;
    let checkpoint = v1::Checkpoint { engine, ..fact(lineage, &step, tree, state) };
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
        engine: String::new(),
    }
}
