//! Repeats a training of the log and checks that it gives the same weights.

use std::{
    collections::BTreeMap,
    future::ready,
    path::{Path, PathBuf},
};

use agent::WorkerProcess;
use anyhow::{Context, bail};
use engine::{AdapterMerge, MergeRule};
use store::{FileCache, Store, TreeManifest};
use wire::{Digest, v1};

use crate::{
    config::TrainerConfig,
    lineage,
    messages::{
        CHECKPOINT_DIR, STATE_DIR, TrainHostSettings, TrainOutcome, TrainProgress, TrainSlice,
        TrainStep,
    },
    sent_weights::write_sent_weights,
    training_files::TrainingFiles,
    training_process::{SILENCE_LIMIT, SILENCE_LIMIT_MIN},
    weight_delta::{self, InitialWeights},
    worker::NEW_ADAPTER_DIR,
};

/// A training to be repeated, and the means to do it.
///
/// The training starts from the order's first step and ends at the checkpoint's step. The
/// comparison has two stages: the digests of the manifests, and, if they differ, the weights
/// themselves.
#[derive(Debug, Clone, Copy)]
pub struct Reproduction<'a> {
    /// The order that the log's training answered.
    pub order: &'a v1::TrainOrder,
    /// The checkpoint in the log, with which the result is compared.
    pub checkpoint: &'a v1::Checkpoint,
    pub store: &'a Store,
    pub cache: &'a FileCache,
    pub config: &'a TrainerConfig,
    /// An empty directory for the files of the training.
    pub scratch: &'a Path,
}

/// The result of a repeated training.
#[derive(Debug, Clone)]
pub struct ReproductionResult {
    /// The digest of the local manifest. If it equals that in the log, the training and its weights
    /// are the same.
    pub local: Digest,
    /// The digest of the manifest in the log.
    pub logged: Digest,
    /// The engine that trained here, with its versions.
    pub engine: String,
    /// The files that differ or exist only on one side, sorted.
    pub differing: Vec<String>,
    /// The L2 norm of the difference of the weights, divided by that of the log's weights. `None`
    /// if they are equal or cannot be compared.
    pub distance: Option<f64>,
}

impl ReproductionResult {
    /// Returns true if the weights are those in the log.
    pub fn is_same(&self) -> bool {
        self.local == self.logged
    }
}

impl Reproduction<'_> {
    /// Trains from the order's first step up to the checkpoint's step, in its own process, and
    /// compares the result. `progress` receives each step and the number of steps.
    pub async fn reproduce_training(
        &self,
        mut progress: impl FnMut(u32, u32) + Send,
    ) -> anyhow::Result<ReproductionResult> {
        let Self { order, checkpoint, store, cache, config, scratch } = *self;
        let files = TrainingFiles { store, cache };
        // Nothing is saved on the way: a short training can be repeated from its start.
        let policy = TrainHostSettings { save_s: f64::MAX, ..config.host_settings() };
        let mut call = files.fetch_request(order, policy, None, scratch.to_owned()).await?;
        call.request.training.save_every = match checkpoint.r#final {
            true => 0,
            false => checkpoint.step,
        };
        let worker = WorkerProcess::start(&config.engine.worker_command(&config.launch))?;
        let mut patience = config.launch.silence_timeout(SILENCE_LIMIT, SILENCE_LIMIT_MIN);
        let (mut engine, mut saved) = (String::new(), None);
        let reached = tokio::sync::Notify::new();
        let training =
            worker.call_with_progress::<TrainOutcome, _>(&call.request, &mut patience, |message| {
                match serde_json::from_value(message) {
                    Ok(TrainProgress::Begun(begun)) => engine = begun.engine,
                    Ok(TrainProgress::Step(step)) => {
                        progress(step.step, step.steps);
                        if step.step == checkpoint.step && step.saved.is_some() {
                            saved = Some(step);
                            reached.notify_one();
                        }
                    }
                    Ok(
                        TrainProgress::Heldout(_) | TrainProgress::Canary(_) | TrainProgress::Busy,
                    )
                    | Err(_) => {}
                }
                ready(())
            });
        tokio::select! {
            ended = training => {
                if let Err(error) = ended {
                    return Err(worker.add_last_log_line(error).await);
                }
            }
            // The steps after the checkpoint are not needed.
            () = reached.notified() => {}
        }
        let Some(TrainStep { step, steps, saved: Some(directory), .. }) = saved else {
            bail!("the training ended before step {} (E112)", checkpoint.step)
        };
        let about = lineage::checkpoint_metadata(order, config.engine.lineage_name(), step, steps);
        let directory = directory.join(CHECKPOINT_DIR);
        let (manifest, local) = Store::describe_directory(&directory, about).await?;
        compare_with_log(files, checkpoint, &directory, (manifest, local, engine)).await
    }
}

impl Reproduction<'_> {
    /// Repeats a training on several boxes here, slice after slice. `outer_steps` are the deltas
    /// that count up to the checkpoint, a list for each outer step. `progress` receives the number
    /// of steps so far and of all.
    ///
    /// # Errors
    /// When a slice was trained by another engine than this one, or cannot be trained.
    pub async fn reproduce_merges(
        &self,
        outer_steps: &[Vec<v1::Delta>],
        mut progress: impl FnMut(u32, u32),
    ) -> anyhow::Result<ReproductionResult> {
        let Self { order, checkpoint, store, cache, scratch, .. } = *self;
        let files = TrainingFiles { store, cache };
        self.check_engines(outer_steps)?;
        // A soup starts from the adapter as the first merge saved it again.
        let adapter = match order.adapter.as_ref().filter(|_| !lineage::is_soup(order)) {
            Some(adapter) => Some(cache.fetch_tree(store, adapter).await?),
            None => None,
        };
        let mut start = match &adapter {
            Some(adapter) => adapter.path().to_owned(),
            None => {
                let new = TrainSlice::default();
                let out = scratch.join("new");
                self.train_slice(files, new, &out).await?;
                out.join(NEW_ADAPTER_DIR).join(CHECKPOINT_DIR)
            }
        };
        let mut states: BTreeMap<String, PathBuf> = BTreeMap::new();
        let mut velocity: Option<PathBuf> = None;
        let (mut engine, mut steps) = (String::new(), 0);
        for (number, deltas) in outer_steps.iter().enumerate() {
            let mut trained = Vec::new();
            for delta in deltas {
                let Some(tree) = &delta.tree else { continue };
                let out = scratch.join(format!("{}-{}", delta.outer, delta.slice));
                let slice = TrainSlice {
                    first: delta.first,
                    steps: delta.steps,
                    start: Some(start.clone()),
                    state: states.remove(&delta.state),
                    own_schedule: lineage::is_soup(order),
                    ..TrainSlice::default()
                };
                let used = slice.state.clone();
                engine = self.train_slice(files, slice, &out).await?;
                let saved = out.join((delta.first + delta.steps).to_string());
                let sent = write_sent_weights(order, &start, &saved, used.clone()).await?;
                if let Some(used) = used {
                    tokio::fs::remove_dir_all(used).await?;
                }
                states.insert(tree.manifest.clone(), saved.join(STATE_DIR));
                trained.push((sent, delta.trained_tokens));
                steps += delta.steps;
                progress(steps, checkpoint.step);
            }
            let merge = AdapterMerge { start, velocity, trained, rule: lineage::merge_rule(order) };
            let has_momentum = matches!(merge.rule, MergeRule::Step(outer) if outer.momentum > 0.0);
            let out = scratch.join(format!("merge-{number}"));
            let moved = scratch.join(format!("velocity-{number}"));
            start = out.clone();
            velocity = Some(moved.clone()).filter(|_| has_momentum);
            let merged = tokio::task::spawn_blocking(move || {
                let written = merge.write_merged(&out, &moved);
                (merge.trained, written)
            });
            let (trained, written) = merged.await?;
            written?;
            // Only the last merge and the optimizers' states are needed.
            for (directory, _) in trained {
                tokio::fs::remove_dir_all(directory).await?;
            }
        }
        let v1::Checkpoint { step, steps, .. } = *checkpoint;
        let about = lineage::checkpoint_metadata(order, lineage::MERGED_ENGINE, step, steps);
        let (manifest, local) = Store::describe_directory(&start, about).await?;
        compare_with_log(files, checkpoint, &start, (manifest, local, engine)).await
    }

    fn check_engines(&self, outer_steps: &[Vec<v1::Delta>]) -> anyhow::Result<()> {
        let family = |engine: &str| engine.split('-').next().unwrap_or_default().to_owned();
        let own = family(self.config.engine.lineage_name());
        let mut all = outer_steps.iter().flatten();
        match all.find(|delta| family(&delta.engine) != own) {
            Some(v1::Delta { outer, slice, agent, engine, .. }) => bail!(
                "slice {slice} of outer step {outer} was trained by {engine} ({agent}), and only \
                 one engine trains here (E111)"
            ),
            None => Ok(()),
        }
    }

    /// Trains one slice into `out`. Returns the engine with its versions.
    async fn train_slice(
        &self,
        files: TrainingFiles<'_>,
        slice: TrainSlice,
        out: &Path,
    ) -> anyhow::Result<String> {
        let Self { order, config, .. } = *self;
        tokio::fs::create_dir_all(out).await?;
        let mut call =
            files.fetch_request(order, config.host_settings(), None, out.to_owned()).await?;
        let has_state = slice.state.is_some();
        call.request.slice = Some(slice);
        let worker = WorkerProcess::start(&config.engine.worker_command(&config.launch))?;
        let mut patience = config.launch.silence_timeout(SILENCE_LIMIT, SILENCE_LIMIT_MIN);
        let mut begun = None;
        let trained =
            worker.call_with_progress::<TrainOutcome, _>(&call.request, &mut patience, |message| {
                if let Ok(TrainProgress::Begun(message)) = serde_json::from_value(message) {
                    begun = Some(message);
                }
                ready(())
            });
        if let Err(error) = trained.await {
            return Err(worker.add_last_log_line(error).await);
        }
        let begun = begun.context("the worker ended before it began (E112)")?;
        match begun.refused.filter(|_| has_state) {
            Some(why) => bail!("the optimizer's state of a slice cannot be used: {why} (R116)"),
            None => Ok(begun.engine),
        }
    }
}

async fn compare_with_log(
    TrainingFiles { store, cache }: TrainingFiles<'_>,
    checkpoint: &v1::Checkpoint,
    directory: &Path,
    (manifest, local, engine): (TreeManifest, Digest, String),
) -> anyhow::Result<ReproductionResult> {
    let tree = checkpoint.tree.as_ref().context("the checkpoint's fact names no files")?;
    let logged = tree.manifest.parse().context("the checkpoint's digest")?;
    let mut reproduced =
        ReproductionResult { local, logged, engine, differing: Vec::new(), distance: None };
    if local == logged {
        return Ok(reproduced);
    }
    let theirs = store.read_manifest(tree).await?;
    reproduced.differing = differing_paths(&manifest, &theirs);
    let theirs = cache.fetch_tree(store, tree).await?;
    let (directory, start) =
        (directory.to_owned(), InitialWeights::Files(theirs.path().to_owned()));
    let weights =
        tokio::task::spawn_blocking(move || weight_delta::compare_weights(&directory, &start))
            .await?;
    reproduced.distance = weights?.change.filter(|distance| *distance > 0.0);
    Ok(reproduced)
}

/// Returns the paths whose files differ or exist in one manifest only, sorted.
fn differing_paths(ours: &TreeManifest, theirs: &TreeManifest) -> Vec<String> {
    let digest = |of: &TreeManifest, path: &str| of.find_file(path).map(|file| file.digest);
    let paths = ours.files.iter().chain(&theirs.files).map(|file| file.path.as_str());
    let mut paths: Vec<&str> =
        paths.filter(|path| digest(ours, path) != digest(theirs, path)).collect();
    paths.sort_unstable();
    paths.dedup();
    paths.into_iter().map(str::to_owned).collect()
}
