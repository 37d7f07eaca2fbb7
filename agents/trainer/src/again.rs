//! A training that the log knows, done again: whether it comes to the same weights.

use std::{future::ready, path::Path};

use anyhow::{Context, bail};
use runtime::Worker;
use store::{Cache, Manifest, Store};
use wire::{Digest, v1};

use crate::{
    calls::{CHECKPOINT, Policy, Progress, Step, Trained},
    change::{self, Start},
    config::Config,
    fetch::Files,
    lineage,
    role::{SILENCE, SILENCE_MIN},
};

/// What is to be done again, and with what.
#[derive(Debug, Clone, Copy)]
pub struct Again<'a> {
    pub order: &'a v1::TrainOrder,
    /// As the log has it.
    pub checkpoint: &'a v1::Checkpoint,
    pub store: &'a Store,
    pub cache: &'a Cache,
    pub config: &'a Config,
    /// An empty directory.
    pub scratch: &'a Path,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Reproduced {
    /// Of the manifest, here and in the log: the same digest is the same training and weights.
    pub here: Digest,
    pub there: Digest,
    /// What trained here, with its versions.
    pub engine: String,
    /// Files that differ, or are only on one side.
    pub differing: Vec<String>,
    /// L2 norm of what the weights differ by, by that of the log's. `None` where they are the
    /// same, or cannot be compared.
    pub distance: Option<f64>,
}

impl Reproduced {
    pub fn is_same(&self) -> bool {
        self.here == self.there
    }
}

impl Again<'_> {
    /// Trains from the order's beginning up to the checkpoint's step, in a process of its own.
    /// `progress` hears of each step, and of how many.
    ///
    /// # Errors
    /// When files cannot be fetched, or the worker cannot be started, refuses, dies or hangs.
    pub async fn reproduce(
        &self,
        mut progress: impl FnMut(u32, u32) + Send,
    ) -> anyhow::Result<Reproduced> {
        let Self { order, checkpoint, store, cache, config, scratch } = *self;
        let files = Files { store, cache };
        // It ends in minutes or can be done again: nothing is saved on the way.
        let policy = Policy { save_s: f64::MAX, ..config.policy() };
        let mut call = files.fetch(order, policy, None, scratch.to_owned()).await?;
        call.value.training.save_every = match checkpoint.r#final {
            true => 0,
            false => checkpoint.step,
        };
        let worker = Worker::start(&config.engine.command(&config.launch))?;
        let mut patience = config.launch.patience(SILENCE, SILENCE_MIN);
        let (mut engine, mut saved) = (String::new(), None);
        let reached = tokio::sync::Notify::new();
        let training = worker.call::<Trained, _>(&call.value, &mut patience, |said| {
            match serde_json::from_value(said) {
                Ok(Progress::Begun(begun)) => engine = begun.engine,
                Ok(Progress::Step(step)) => {
                    progress(step.step, step.steps);
                    if step.step == checkpoint.step && step.saved.is_some() {
                        saved = Some(step);
                        reached.notify_one();
                    }
                }
                Ok(Progress::Busy) | Err(_) => {}
            }
            ready(())
        });
        tokio::select! {
            ended = training => {
                if let Err(error) = ended {
                    return Err(worker.last_words(error).await);
                }
            }
            // What is trained after it is of no interest.
            () = reached.notified() => {}
        }
        let Some(Step { step, steps, saved: Some(directory), .. }) = saved else {
            bail!("the training ended before step {} (E112)", checkpoint.step)
        };
        let about = lineage::about(order, config.engine.family(), step, steps);
        let directory = directory.join(CHECKPOINT);
        let (manifest, here) = Store::describe(&directory, about).await?;
        compare(files, checkpoint, &directory, (manifest, here, engine)).await
    }
}

async fn compare(
    Files { store, cache }: Files<'_>,
    checkpoint: &v1::Checkpoint,
    directory: &Path,
    (manifest, here, engine): (Manifest, Digest, String),
) -> anyhow::Result<Reproduced> {
    let tree = checkpoint.tree.as_ref().context("the checkpoint's fact names no files")?;
    let there = tree.manifest.parse().context("the checkpoint's digest")?;
    let mut reproduced = Reproduced { here, there, engine, differing: Vec::new(), distance: None };
    if here == there {
        return Ok(reproduced);
    }
    let theirs = store.manifest(tree).await?;
    reproduced.differing = differing(&manifest, &theirs);
    let theirs = cache.tree(store, tree).await?;
    let (directory, start) = (directory.to_owned(), Start::Files(theirs.path().to_owned()));
    let weights = tokio::task::spawn_blocking(move || change::compare(&directory, &start)).await?;
    reproduced.distance = weights?.change.filter(|distance| *distance > 0.0);
    Ok(reproduced)
}

fn differing(ours: &Manifest, theirs: &Manifest) -> Vec<String> {
    let digest = |of: &Manifest, path: &str| of.file(path).map(|file| file.digest);
    let paths = ours.files.iter().chain(&theirs.files).map(|file| file.path.as_str());
    let mut paths: Vec<&str> =
        paths.filter(|path| digest(ours, path) != digest(theirs, path)).collect();
    paths.sort_unstable();
    paths.dedup();
    paths.into_iter().map(str::to_owned).collect()
}
