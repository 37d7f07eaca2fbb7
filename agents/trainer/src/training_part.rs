//! The parts of a training on several boxes: slices and merges.

mod optimizer_states;

use std::{
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, Instant},
};

use agent::{JobError, LeasedJob, WorkerProcess};
use anyhow::{Context, anyhow};
use engine::AdapterMerge;
use store::{CachedTree, TreeMetadata, TreePlace};
use wire::{FactBody, FactKey, v1};

use self::optimizer_states::OptimizerStates;
use crate::{
    config::TrainerConfig,
    lineage,
    messages::{
        CHECKPOINT_DIR, STATE_DIR, TrainOutcome, TrainProgress, TrainSlice, TrainStep,
        TrainingBegun,
    },
    training_check::{self, StepStats},
    training_files::TrainingFiles,
    training_process::{SILENCE_LIMIT, SILENCE_LIMIT_MIN, TrainingDir, handle_progress},
    weight_delta::InitialWeights,
    worker::NEW_ADAPTER_DIR,
};

/// The interval at which a box that trains a slice asks whether it is still needed.
const CLOSE_POLL: Duration = Duration::from_secs(5);

/// The longest time for which the removal of merged weights may delay a training.
const REMOVE_LIMIT: Duration = Duration::from_secs(30);

/// A part of a training on several boxes, as ordered.
#[derive(Clone, Copy)]
pub(crate) struct TrainingPart<'a> {
    pub config: &'a TrainerConfig,
    pub job: &'a LeasedJob,
    pub order: &'a v1::TrainOrder,
    /// The number of times that the tokens of a pass are halved.
    pub halvings: u32,
}

/// The saved result of a slice.
struct SavedSlice {
    begun: TrainingBegun,
    /// `None` if the training ends before the slice, and for a new adapter.
    step: Option<TrainStep>,
    stats: StepStats,
}

/// Returns true if the part of an order is in the log, or no longer needed. False for orders of
/// whole trainings.
pub(crate) async fn is_part_done(
    job: &LeasedJob,
    order: &v1::TrainOrder,
) -> Result<bool, JobError> {
    let cycle = order.cycle;
    match &order.part {
        None => Ok(false),
        Some(v1::train_order::Part::Slice(slice)) => {
            let v1::train_order::Slice { outer, slice, .. } = *slice;
            Ok(job.is_written(FactKey::Delta { cycle, outer, slice }).await?
                || job.is_written(FactKey::SliceClose { cycle, outer }).await?)
        }
        Some(v1::train_order::Part::Merge(merge)) => {
            job.is_written(FactKey::Merge { cycle, outer: merge.outer }).await
        }
    }
}

/// Returns the delta with the figures of its last step.
fn add_figures(delta: v1::Delta, step: &TrainStep) -> v1::Delta {
    v1::Delta {
        steps: step.step.saturating_sub(delta.first),
        tokens: step.tokens,
        trained_tokens: step.trained_tokens,
        loss: step.loss,
        learning_rate: step.learning_rate,
        grad_norm: step.grad_norm,
        grad_norm_max: step.grad_norm_max,
        packing: step.packing,
        wall_s: step.wall_s,
        ..delta
    }
}

impl TrainingPart<'_> {
    /// Trains the steps of a slice, publishes the weights and writes the `delta` fact. The
    /// optimizer's state stays on this host.
    pub(crate) async fn train_slice(self, slice: &v1::train_order::Slice) -> Result<(), JobError> {
        let Self { config, job, order, .. } = self;
        let missing =
            |what: &str| JobError::fatal_failure(anyhow!("the slice names no {what} (E111)"));
        let planned = slice.planned.as_ref().ok_or_else(|| missing("steps"))?;
        let start = slice.start.as_ref().ok_or_else(|| missing("start"))?;
        let v1::train_order::Slice { outer, slice: number, .. } = *slice;
        let scratch = TrainingDir::create_for(job, &format!("{}-{outer}-{number}", order.cycle))?;
        let states = OptimizerStates::for_training(&job.directory, &job.run, order.cycle);
        let from = job.cache.fetch_tree(&job.store, start).await?;
        let asked = TrainSlice {
            first: planned.first,
            steps: planned.steps,
            start: Some(from.path().to_owned()),
            state: states.find_state(&planned.state),
        };
        let has_state = asked.state.is_some();
        let saved = tokio::select! {
            saved = self.run_worker(asked, &scratch) => saved?,
            () = self.wait_until_closed(outer) => {
                tracing::info!(run = %job.run, outer, slice = number, "closed without this slice");
                return Ok(());
            }
        };
        let SavedSlice { begun, step, stats } = saved;
        let continued = has_state && begun.refused.is_none();
        let mut delta = v1::Delta {
            run: job.run.to_string(),
            cycle: order.cycle,
            outer,
            slice: number,
            agent: job.agent.clone(),
            start: start.manifest.clone(),
            first: planned.first,
            total_steps: begun.steps,
            engine: begun.engine,
            skipped: begun.skipped,
            state: if continued { planned.state.clone() } else { String::new() },
            ..Default::default()
        };
        if let Some(step) = step {
            let directory = step.saved.clone().ok_or_else(|| missing("saved weights"))?;
            let files = directory.join(CHECKPOINT_DIR);
            let initial = InitialWeights::Files(from.path().to_owned());
            training_check::check_saved_step(&files, &initial, &step, &stats).await?;
            delta = add_figures(delta, &step);
            let about = lineage::delta_metadata(order, config.engine.lineage_name(), &delta);
            let place = TreePlace::for_delta(&job.run, order.cycle, outer, number);
            let tree = job.cache.publish_tree(&job.store, &files, &place, about).await?;
            states.keep_state(&tree.manifest, &directory.join(STATE_DIR));
            delta.tree = Some(tree);
        }
        let place = FactKey::Delta { cycle: order.cycle, outer, slice: number };
        job.write_result(place.clone(), FactBody::Delta(delta.clone())).await?;
        // If another box was first, nobody needs these weights.
        let is_accepted = match job.read_fact(place).await? {
            Some(FactBody::Delta(accepted)) => accepted.tree == delta.tree,
            _ => true,
        };
        if let Some(tree) = delta.tree.filter(|_| !is_accepted) {
            let place = TreePlace::for_delta(&job.run, order.cycle, outer, number);
            self.remove_trees(vec![(place, tree)]).await;
        }
        Ok(())
    }

    /// Waits until the outer step is closed. An unreachable log is asked again.
    async fn wait_until_closed(self, outer: u32) {
        let place = FactKey::SliceClose { cycle: self.order.cycle, outer };
        while !matches!(self.job.is_written(place.clone()).await, Ok(true)) {
            tokio::time::sleep(CLOSE_POLL).await;
        }
    }

    /// Runs the steps of a slice in a worker.
    async fn run_worker(
        self,
        slice: TrainSlice,
        scratch: &TrainingDir,
    ) -> Result<SavedSlice, JobError> {
        let Self { config, job, order, halvings } = self;
        let TrainerConfig { launch, engine, .. } = config;
        let files = TrainingFiles { store: &job.store, cache: &job.cache };
        let settings = config.host_settings();
        let mut call = files.fetch_request(order, settings, None, scratch.0.clone()).await?;
        call.request.policy.halvings = halvings;
        call.request.slice = Some(slice);
        let worker = WorkerProcess::start(&engine.worker_command(launch))?;
        let mut patience = launch.silence_timeout(SILENCE_LIMIT, SILENCE_LIMIT_MIN);
        let mut stats = StepStats::new(engine.describe_engine(), 0);
        let seen: Mutex<(Option<TrainingBegun>, Option<TrainStep>)> = Mutex::default();
        let note = |progress: serde_json::Value| {
            let begun = serde_json::from_value::<TrainProgress>(progress.clone()).ok();
            let step = handle_progress(job, progress, &mut stats);
            if let Ok(mut seen) = seen.lock() {
                if let Some(TrainProgress::Begun(begun)) = begun {
                    seen.0 = Some(begun);
                }
                if let Some(step) = step.filter(|step| step.saved.is_some()) {
                    seen.1 = Some(step);
                }
            }
            std::future::ready(())
        };
        let trained =
            worker.call_with_progress::<TrainOutcome, _>(&call.request, &mut patience, note).await;
        match trained {
            Ok(TrainOutcome { stopped_at: None }) => {}
            Ok(TrainOutcome { stopped_at: Some(_) }) => {
                return Err(JobError::retryable_failure(anyhow!(
                    "the slice was ended by SIGTERM; it is trained again (E112)"
                )));
            }
            Err(error) => return Err(JobError::from_model_worker(error, &worker).await),
        }
        let (begun, step) = seen.into_inner().unwrap_or_default();
        let begun = begun.ok_or_else(|| {
            JobError::retryable_failure(anyhow!("the worker ended before it began (E112)"))
        })?;
        Ok(SavedSlice { begun, step, stats })
    }

    /// Merges the weights of an outer step, or creates the new adapter, and writes the `merge` fact.
    /// A checkpoint that is due is published first.
    pub(crate) async fn merge_deltas(self, merge: &v1::train_order::Merge) -> Result<(), JobError> {
        let Self { job, order, .. } = self;
        let began = Instant::now();
        let name = format!("{}-{}-merge", order.cycle, merge.outer);
        let scratch = TrainingDir::create_for(job, &name)?;
        let (adapter, momentum) = (scratch.0.join("adapter"), scratch.0.join("momentum"));
        let drift = match merge.outer {
            0 => {
                self.create_adapter(&adapter, &scratch).await?;
                0.0
            }
            _ => self.write_merged(merge, &adapter, &momentum).await?,
        };
        let publish = |files: PathBuf, is_momentum: bool| async move {
            let content = if is_momentum { "momentum" } else { "adapter" };
            let about = lineage::merge_metadata(order, content, merge);
            let place = TreePlace::for_merge(&job.run, order.cycle, merge.outer, is_momentum);
            self.publish(&files, &place, about).await
        };
        let tree = publish(adapter.clone(), false).await?;
        let momentum = match momentum.exists() {
            true => Some(publish(momentum, true).await?),
            false => None,
        };
        if let Some(checkpoint) = &merge.checkpoint {
            self.publish_checkpoint(checkpoint, &adapter).await?;
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
            wall_s: began.elapsed().as_secs_f64(),
        };
        let place = FactKey::Merge { cycle: order.cycle, outer: merge.outer };
        job.write_result(place.clone(), FactBody::Merge(fact.clone())).await?;
        self.check_merge(place, &fact).await?;
        self.remove_merged(merge).await;
        Ok(())
    }

    /// Fails if the log has other bytes for the merge: two boxes do not compute alike. A new adapter
    /// is not compared, because engines create different ones.
    async fn check_merge(self, place: FactKey, own: &v1::Merge) -> Result<(), JobError> {
        let Some(FactBody::Merge(accepted)) = self.job.read_fact(place).await? else {
            return Ok(());
        };
        let manifest = |merge: &v1::Merge| merge.tree.clone().unwrap_or_default().manifest;
        let (ours, theirs) = (manifest(own), manifest(&accepted));
        if own.outer == 0 || ours == theirs {
            return Ok(());
        }
        let v1::Merge { cycle, outer, agent, .. } = &accepted;
        Err(JobError::host_unfit(anyhow!(
            "merge {outer} of cycle {cycle} has the digest {ours} here and {theirs} on {agent}; one \
             of the two boxes computes wrong: check memory and processor of both (E118)"
        )))
    }

    /// Writes the adapter from which all boxes start, as the engine of this box creates it.
    async fn create_adapter(self, adapter: &Path, scratch: &TrainingDir) -> Result<(), JobError> {
        let slice = TrainSlice { first: 0, steps: 0, start: None, state: None };
        self.run_worker(slice, scratch).await?;
        let made = scratch.0.join(NEW_ADAPTER_DIR).join(CHECKPOINT_DIR);
        let moved = tokio::fs::rename(&made, adapter).await;
        moved
            .with_context(|| format!("move {}", made.display()))
            .map_err(JobError::retryable_failure)
    }

    /// Returns the drift.
    async fn write_merged(
        self,
        merge: &v1::train_order::Merge,
        adapter: &Path,
        momentum: &Path,
    ) -> Result<f64, JobError> {
        let Self { job, order, .. } = self;
        let fetch = |tree: Option<v1::Tree>, what: &'static str| async move {
            let missing = || JobError::fatal_failure(anyhow!("the merge names no {what} (E111)"));
            let tree = tree.ok_or_else(missing)?;
            Ok::<CachedTree, JobError>(job.cache.fetch_tree(&job.store, &tree).await?)
        };
        let start = fetch(merge.start.clone(), "start").await?;
        let velocity = job.fetch_optional_tree(merge.momentum.as_ref()).await?;
        let mut deltas = Vec::new();
        for delta in &merge.deltas {
            deltas.push((fetch(delta.tree.clone(), "weights").await?, delta.trained_tokens));
        }
        let files = AdapterMerge {
            start: start.path().to_owned(),
            velocity: velocity.as_ref().map(|tree| tree.path().to_owned()),
            trained: deltas
                .iter()
                .map(|(tree, tokens)| (tree.path().to_owned(), *tokens))
                .collect(),
            outer: lineage::outer_optimizer(order),
        };
        let (adapter, momentum) = (adapter.to_owned(), momentum.to_owned());
        let merging = move || files.write_merged(&adapter, &momentum);
        let merged =
            tokio::task::spawn_blocking(merging).await.map_err(JobError::retryable_failure)?;
        merged.context("merge the weights of the slices").map_err(|error| {
            // Another box may have room on its disk.
            match error.chain().any(|cause| cause.is::<std::io::Error>()) {
                true => JobError::retryable_failure(error),
                false => JobError::fatal_failure(error),
            }
        })
    }

    async fn publish(
        self,
        files: &Path,
        place: &TreePlace,
        about: TreeMetadata,
    ) -> Result<v1::Tree, JobError> {
        Ok(self.job.cache.publish_tree(&self.job.store, files, place, about).await?)
    }

    async fn publish_checkpoint(
        self,
        due: &v1::Checkpoint,
        adapter: &Path,
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
        let about = lineage::checkpoint_metadata(order, lineage::MERGED_ENGINE, step, steps);
        let place = TreePlace::for_checkpoint(&job.run, order.cycle, step);
        let tree = self.publish(adapter, &place, about).await?;
        let checkpoint = v1::Checkpoint {
            tree: Some(tree),
            agent: job.agent.clone(),
            engine: self.config.engine.describe_engine(),
            weight_change,
            ..due.clone()
        };
        let place = FactKey::Checkpoint { cycle: order.cycle, step };
        job.write_result(place, FactBody::Checkpoint(checkpoint)).await
    }

    /// Removes the weights that went into a merge, which nobody needs any more.
    pub(crate) async fn remove_merged(self, merge: &v1::train_order::Merge) {
        let Self { job, order, .. } = self;
        let outer = merge.outer;
        let mut removed: Vec<(TreePlace, v1::Tree)> = Vec::new();
        for delta in &merge.deltas {
            let place = TreePlace::for_delta(&job.run, order.cycle, outer, delta.slice);
            removed.extend(delta.tree.clone().map(|tree| (place, tree)));
        }
        let before = outer.saturating_sub(1);
        let starts = [(merge.start.clone(), false), (merge.momentum.clone(), true)];
        for (tree, is_momentum) in starts {
            // The adapter that the order names belongs to another cycle.
            let tree = tree.filter(|tree| Some(tree) != order.adapter.as_ref());
            let place = TreePlace::for_merge(&job.run, order.cycle, before, is_momentum);
            removed.extend(tree.map(|tree| (place, tree)));
        }
        self.remove_trees(removed).await;
    }

    /// A failure is only logged.
    async fn remove_trees(self, trees: Vec<(TreePlace, v1::Tree)>) {
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
