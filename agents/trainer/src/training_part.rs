//! The parts of a training on several boxes: slices and merges.

mod kept_worker;
mod merge;
mod optimizer_states;
mod soup;
mod start_weights;

use std::{path::Path, sync::Mutex, time::Duration};

use agent::{JobError, LeasedJob, WorkerProcess};
use anyhow::anyhow;
use store::TreePlace;
use tokio::sync::watch;
use wire::{FactBody, FactKey, v1};

use self::optimizer_states::OptimizerStates;
pub(crate) use self::{kept_worker::KeptWorker, merge::scores_canary};
use crate::{
    config::TrainerConfig,
    last_speed::LastSpeed,
    lineage,
    messages::{
        CHECKPOINT_DIR, STATE_DIR, TrainOutcome, TrainProgress, TrainSlice, TrainStep,
        TrainingBegun,
    },
    sent_weights::{find_usable_state, write_sent_weights},
    training_check::{self, StepStats},
    training_files::TrainingFiles,
    training_process::{SILENCE_LIMIT, SILENCE_LIMIT_MIN, TrainingDir, handle_progress},
    weight_delta::InitialWeights,
};

/// The interval at which a box that trains a slice asks whether it is still needed.
const CLOSE_POLL: Duration = Duration::from_secs(5);

/// Returns the name of the training of an order, for its kept worker.
pub(crate) fn training_name(order: &v1::TrainOrder, halvings: u32) -> String {
    format!("{} {} {halvings}", order.run, order.cycle)
}

/// A part of a training on several boxes, as ordered.
#[derive(Clone, Copy)]
pub(crate) struct TrainingPart<'a> {
    pub config: &'a TrainerConfig,
    pub job: &'a LeasedJob,
    pub order: &'a v1::TrainOrder,
    /// The number of times that the tokens of a pass are halved.
    pub halvings: u32,
    pub kept_worker: &'a KeptWorker,
    /// True once the agent drains.
    pub drain_tx: &'a watch::Sender<bool>,
    pub last_speed: &'a LastSpeed,
}

/// The saved result of a slice.
struct SavedSlice {
    begun: TrainingBegun,
    /// `None` if the training ends before the slice, and for a new adapter.
    step: Option<TrainStep>,
    stats: StepStats,
    heldout_nll: Option<f64>,
    canary: Vec<f32>,
}

/// The content of a worker's messages about one slice.
#[derive(Default)]
struct SliceMessages {
    begun: Option<TrainingBegun>,
    /// The last saved step.
    step: Option<TrainStep>,
    heldout_nll: Option<f64>,
    canary: Vec<f32>,
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

/// Adds the statistics of a slice's last step to its delta.
fn add_step_statistics(delta: v1::Delta, step: &TrainStep) -> v1::Delta {
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

/// Returns the bytes of the files in a directory.
fn count_bytes(directory: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(directory)? {
        bytes += entry?.metadata()?.len();
    }
    Ok(bytes)
}

async fn wait_until_draining(drain_tx: &watch::Sender<bool>) {
    let mut drain = drain_tx.subscribe();
    // The sender lives as long as the role.
    let _ = drain.wait_for(|is_draining| *is_draining).await;
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
        let from = self.fetch_start(start, &slice.derivation).await?;
        let state = states.find_state(&planned.state);
        let state = find_usable_state(order, from.path(), state).await;
        let asked = TrainSlice {
            first: planned.first,
            steps: planned.steps,
            start: Some(from.path().to_owned()),
            state: state.clone(),
            own_schedule: lineage::is_soup(order),
            ..TrainSlice::default()
        };
        let saved = tokio::select! {
            saved = self.run_worker(asked, &scratch) => saved?,
            () = self.wait_until_closed(outer) => {
                tracing::info!(run = %job.run, outer, slice = number, "closed without this slice");
                return Ok(());
            }
        };
        let SavedSlice { begun, step, stats, .. } = saved;
        let state = state.filter(|_| begun.refused.is_none());
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
            state: state.as_ref().map(|_| planned.state.clone()).unwrap_or_default(),
            ..Default::default()
        };
        if let Some(step) = step {
            let directory = step.saved.clone().ok_or_else(|| missing("saved weights"))?;
            let files = directory.join(CHECKPOINT_DIR);
            let initial = InitialWeights::Files(from.path().to_owned());
            training_check::check_saved_step(&files, &initial, &step, &stats).await?;
            delta = add_step_statistics(delta, &step);
            self.last_speed.record_speed(order, &stats);
            let sent = write_sent_weights(order, from.path(), &directory, state).await;
            let sent = sent.map_err(JobError::retryable_failure)?;
            let about = lineage::delta_metadata(order, config.engine.lineage_name(), &delta);
            let place = TreePlace::for_delta(&job.run, order.cycle, outer, number);
            delta.bytes = count_bytes(&sent).map_err(JobError::retryable_failure)?;
            let tree = job.cache.publish_tree(&job.store, &sent, &place, about).await?;
            states.keep_state(&tree.manifest, &directory.join(STATE_DIR));
            delta.tree = Some(tree);
        }
        self.write_delta(delta).await
    }

    /// Writes the `delta` fact. If another box was first, removes the weights, which nobody needs.
    async fn write_delta(self, delta: v1::Delta) -> Result<(), JobError> {
        let Self { job, .. } = self;
        let v1::Delta { cycle, outer, slice, .. } = delta;
        let place = FactKey::Delta { cycle, outer, slice };
        job.write_result(place.clone(), FactBody::Delta(delta.clone())).await?;
        let is_accepted = match job.read_fact(place).await? {
            Some(FactBody::Delta(accepted)) => accepted.tree == delta.tree,
            _ => true,
        };
        if let Some(tree) = delta.tree.filter(|_| !is_accepted) {
            let place = TreePlace::for_delta(&job.run, cycle, outer, slice);
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

    /// Returns true if the training has slices after those of this outer step.
    fn has_more_slices(self) -> bool {
        match &self.order.part {
            Some(v1::train_order::Part::Slice(slice)) => slice.more,
            Some(v1::train_order::Part::Merge(merge)) => {
                merge.checkpoint.as_ref().is_none_or(|due| !due.r#final)
            }
            None => false,
        }
    }

    /// Runs the steps of a slice in a worker. When the agent drains, the worker ends at once: other
    /// boxes wait for the slice, and a part of it has no use.
    async fn run_worker(
        self,
        slice: TrainSlice,
        scratch: &TrainingDir,
    ) -> Result<SavedSlice, JobError> {
        tokio::select! {
            biased;
            () = wait_until_draining(self.drain_tx) => Err(JobError::Stopped),
            saved = self.call_worker(slice, scratch) => saved,
        }
    }

    /// Calls the worker of an earlier slice, or a new one, which ends if this future is dropped.
    async fn call_worker(
        self,
        slice: TrainSlice,
        scratch: &TrainingDir,
    ) -> Result<SavedSlice, JobError> {
        let Self { config, job, order, halvings, .. } = self;
        let TrainerConfig { launch, engine, .. } = config;
        let files = TrainingFiles { store: &job.store, cache: &job.cache };
        let settings = config.host_settings();
        let mut call = files.fetch_request(order, settings, None, scratch.0.clone()).await?;
        call.request.policy.halvings = halvings;
        let is_score = slice.heldout.is_some();
        call.request.slice = Some(slice);
        let training = training_name(order, halvings);
        let worker = match self.kept_worker.take_worker(&training) {
            Some(worker) => {
                tracing::info!(run = %job.run, "the process of the slice before trains this one");
                worker
            }
            None => WorkerProcess::start(&engine.worker_command(launch))?,
        };
        let mut patience = launch.silence_timeout(SILENCE_LIMIT, SILENCE_LIMIT_MIN);
        let mut stats = StepStats::new(engine.describe_engine(), 0);
        let seen: Mutex<SliceMessages> = Mutex::default();
        let note = |progress: serde_json::Value| {
            let message = serde_json::from_value::<TrainProgress>(progress.clone()).ok();
            let step = handle_progress(job, progress, &mut stats);
            if let Ok(mut seen) = seen.lock() {
                match message {
                    Some(TrainProgress::Begun(begun)) => seen.begun = Some(begun),
                    Some(TrainProgress::Heldout(nll)) => seen.heldout_nll = nll,
                    Some(TrainProgress::Canary(logprobs)) => seen.canary = logprobs,
                    _ => {}
                }
                if let Some(step) = step.filter(|step| step.saved.is_some()) {
                    seen.step = Some(step);
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
        let SliceMessages { begun, step, heldout_nll, canary } =
            seen.into_inner().unwrap_or_default();
        let begun = begun.ok_or_else(|| {
            JobError::retryable_failure(anyhow!("the worker ended before it began (E112)"))
        })?;
        if is_score || self.has_more_slices() {
            self.kept_worker.keep_worker(training, worker);
        }
        Ok(SavedSlice { begun, step, stats, heldout_nll, canary })
    }
}
