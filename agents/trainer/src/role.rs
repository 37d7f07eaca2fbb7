//! The agent's side: fetches the files, starts the worker, and publishes each checkpoint as it is
//! saved.

use std::{convert::Infallible, path::Path, sync::Mutex, time::Duration};

use agent::{
    AgentRole, JobError, JobFault, LeasedJob, MemoryNeeds, WorkerProcess, halve_micro_batch,
};
use anyhow::anyhow;
use doctor::DoctorFinding;
use futures::future::{BoxFuture, FutureExt};
use hardware::SupportLevel;
use tokio::sync::{Semaphore, mpsc, watch};
use wire::{
    FactBody, WorkKind,
    v1::{self, agent_status::TrainingSpeed},
};

use crate::{
    config::{TrainerConfig, TrainingEngine},
    last_speed::LastSpeed,
    lineage::TrainingLineage,
    memory_needs,
    messages::{TrainOutcome, UNPUBLISHED_MAX},
    publish::{self, SavedStep},
    torch_probe::TorchProbe,
    training_check::StepStats,
    training_files::TrainingFiles,
    training_part::{KeptWorker, TrainingPart, is_part_done, scores_canary, training_name},
    training_process::{SILENCE_LIMIT, SILENCE_LIMIT_MIN, TrainingDir, handle_progress},
    weight_delta::InitialWeights,
};

/// The trainer role of an agent. It runs one training at a time.
///
/// An order is trained in these steps:
///
/// 1. Return if the log has the last checkpoint.
/// 2. Check the host, and PyTorch if it is the engine.
/// 3. Find the newest checkpoint to resume from, and fetch the files.
/// 4. Start a worker; publish each step that it saves while it continues.
///
/// If the host runs out of memory, the training is repeated with half the tokens in a pass, if the
/// engine supports that. When the agent drains, PyTorch saves and ends, and another agent resumes; a
/// part of a training on several boxes ends at once, and another agent does it.
pub struct TrainerRole {
    config: TrainerConfig,
    probe: TorchProbe,
    training_permit: Semaphore,
    /// True once the agent drains and a training should save and end.
    drain_tx: watch::Sender<bool>,
    /// The training that last ran out of memory, and the number of times its passes were halved.
    last_halved: Mutex<(String, u32)>,
    kept_worker: KeptWorker,
    last_speed: LastSpeed,
}

impl TrainerRole {
    /// Creates the role with its configuration.
    pub fn new(config: TrainerConfig) -> Self {
        let drain_tx = watch::Sender::new(false);
        let training_permit = Semaphore::new(1);
        Self {
            config,
            probe: TorchProbe::default(),
            training_permit,
            drain_tx,
            last_halved: Mutex::default(),
            kept_worker: KeptWorker::default(),
            last_speed: LastSpeed::default(),
        }
    }

    /// Repeats the training with smaller passes if the host runs out of memory.
    async fn train_order(&self, job: &LeasedJob) -> Result<(), JobError> {
        let _busy = self.training_permit.acquire().await.map_err(JobError::retryable_failure)?;
        let order = expect_train_order(job)?;
        let name = cycle_label(job, order);
        loop {
            let halvings = self.halving_count(&name);
            let outcome = self.train_once(job, order, halvings).await;
            let failed = match outcome.map_err(|error| job.explain_termination(error)) {
                Err(failed @ JobError::Failed { .. }) => failed,
                other => return other,
            };
            let JobError::Failed { fault, message, .. } = &failed else { return Err(failed) };
            if matches!(fault, JobFault::Transient(_) | JobFault::HostBroken) {
                self.probe.invalidate_result(&self.config.launch).await;
            }
            let less = halve_micro_batch(self.tokens_per_pass(order), halvings + 1);
            let Some(less) = less.filter(|_| {
                *fault == JobFault::OutOfMemory && self.config.engine.can_split_passes()
            }) else {
                return Err(failed);
            };
            tracing::warn!(run = %job.run, message, pass_tokens = less, "retrying with smaller \
                                                                         passes");
            job.progress.set_note(format!("passes reduced to {less} tokens: {message}"));
            self.set_halvings(name.clone(), halvings + 1);
        }
    }

    /// Returns how often passes were halved in the training with this [`cycle_label`].
    fn halving_count(&self, name: &str) -> u32 {
        let halved = self.last_halved.lock();
        halved.ok().filter(|last| last.0 == name).map_or(0, |last| last.1)
    }

    fn set_halvings(&self, name: String, halvings: u32) {
        if let Ok(mut halved) = self.last_halved.lock() {
            *halved = (name, halvings);
        }
    }

    /// Returns the tokens of one forward and backward pass: the order's value, or else that of the
    /// hardware profile.
    fn tokens_per_pass(&self, order: &v1::TrainOrder) -> u32 {
        match order.training.as_ref().map_or(0, |training| training.micro_batch_tokens) {
            0 => self.config.launch.profile.training.micro_batch_tokens,
            tokens => tokens,
        }
    }

    /// Trains once, or does the ordered part of a training, with passes halved `halvings` times.
    async fn train_once(
        &self,
        job: &LeasedJob,
        order: &v1::TrainOrder,
        halvings: u32,
    ) -> Result<(), JobError> {
        let Some(ordered) = &order.part else {
            self.kept_worker.end_worker();
            return self.train_whole(job, order, halvings).await;
        };
        let Self { config, kept_worker, drain_tx, last_speed, .. } = self;
        let part = TrainingPart { config, job, order, halvings, kept_worker, drain_tx, last_speed };
        if is_part_done(job, order).await? {
            // The box that merged may have died before it removed what it merged.
            if let v1::train_order::Part::Merge(merge) = ordered {
                part.remove_merged(merge).await;
            }
            return Ok(());
        }
        match ordered {
            v1::train_order::Part::Slice(slice) => {
                if !kept_worker.serves_training(&training_name(order, halvings)) {
                    self.check_engine(job, order).await?;
                }
                part.train_slice(slice).await
            }
            v1::train_order::Part::Merge(merge) => {
                let due = merge.checkpoint.as_ref();
                let is_scored =
                    merge.heldout.is_some() || due.is_some_and(|due| scores_canary(order, due));
                if merge.outer == 0 || is_scored {
                    self.check_engine(job, order).await?;
                }
                part.merge_deltas(merge).await
            }
        }
    }

    /// Trains from the newest checkpoint to the end.
    async fn train_whole(
        &self,
        job: &LeasedJob,
        order: &v1::TrainOrder,
        halvings: u32,
    ) -> Result<(), JobError> {
        let TrainerConfig { launch, engine, .. } = &self.config;
        let lineage = TrainingLineage { job, order, engine: engine.lineage_name() };
        if let Some(last) = lineage.newest_checkpoint().await?.filter(|newest| newest.r#final) {
            // The agent that wrote it may have died before it removed the state.
            lineage.remove_state_before(last.step).await;
            return Ok(());
        }
        self.check_engine(job, order).await?;
        let scratch = TrainingDir::create_for(job, &order.cycle.to_string())?;
        let point = lineage.find_resume_point().await?;
        if let Some(point) = &point {
            lineage.remove_state_before(point.fact.step).await;
        }
        let previous = point.as_ref().map(|point| point.fact.clone());
        let files = TrainingFiles { store: &job.store, cache: &job.cache };
        let mut call = files
            .fetch_request(order, self.config.host_settings(), point, scratch.0.clone())
            .await?;
        call.request.policy.halvings = halvings;
        let worker = WorkerProcess::start(&engine.worker_command(launch))?;
        let (saved, to_publish) = mpsc::channel(UNPUBLISHED_MAX);
        let mut patience = launch.silence_timeout(SILENCE_LIMIT, SILENCE_LIMIT_MIN);
        let mut stats = StepStats::new(engine.describe_engine(), 0);
        let training = worker.call_with_progress::<TrainOutcome, _>(
            &call.request,
            &mut patience,
            move |progress| {
                let step = handle_progress(job, progress, &mut stats);
                if step.as_ref().is_some_and(|step| step.saved.is_some()) {
                    self.last_speed.record_speed(order, &stats);
                }
                let saved = saved.clone();
                let stats = stats.clone();
                async move {
                    let Some(step) = step else { return };
                    if let Some(directory) = step.saved.clone() {
                        // The receiver is dropped only if publishing failed, which is reported.
                        let _ = saved.send(SavedStep { step, directory, stats }).await;
                    }
                }
            },
        );
        // Training continues while a checkpoint is uploaded. If a checkpoint cannot be published,
        // the training ends at once. If training fails, the steps that it saved are still
        // published.
        let start = InitialWeights::from_request(&call.request);
        let publishing = publish::publish_all(lineage, start, previous, to_publish);
        let both = async { tokio::try_join!(training.map(Ok), publishing) };
        let (trained, ()) = tokio::select! {
            both = both => both?,
            never = self.hand_over_on_drain(&worker) => match never {},
        };
        match trained {
            Ok(TrainOutcome { stopped_at: None }) => Ok(()),
            Ok(TrainOutcome { stopped_at: Some(step) }) => {
                tracing::info!(run = %job.run, step, "training saved; it can be resumed");
                Err(self.interruption_error())
            }
            Err(_) if self.is_handing_over() => Err(JobError::Stopped),
            Err(error) => Err(JobError::from_model_worker(error, &worker).await),
        }
    }

    /// Checks the host, and that the engine can train the base: PyTorch is probed.
    async fn check_engine(&self, job: &LeasedJob, order: &v1::TrainOrder) -> Result<(), JobError> {
        self.check_host(order).await?;
        check_quantization(order, &self.config)?;
        match &self.config.engine {
            TrainingEngine::PyTorch(pytorch) => {
                let quantized = memory_needs::is_quantized(order);
                self.probe.ensure_passed(pytorch, &self.config.launch, quantized).await
            }
            TrainingEngine::Candle => match memory_needs::read_base_config(job, order).await? {
                // Another host may train with PyTorch.
                Some(base) => base.require_embedded(Path::new("")).map_err(JobError::host_unfit),
                None => Ok(()),
            },
        }
    }

    /// Checks the host with the doctor if the role uses a GPU. Another host may still do the
    /// training.
    async fn check_host(&self, order: &v1::TrainOrder) -> Result<(), JobError> {
        let TrainerConfig { launch, doctor, .. } = &self.config;
        if !self.config.uses_gpu() {
            return Ok(());
        }
        let plan = memory_needs::doctor_plan(order, &launch.profile);
        match doctor.check_plan(&launch.profile, &plan).await {
            Some(DoctorFinding { id, seen, remedy, .. }) => {
                Err(JobError::host_unfit(anyhow!("{id}: {seen}; {remedy} (E115)")))
            }
            None => Ok(()),
        }
    }

    /// Terminates the worker once the agent drains, so that it saves and ends. It never returns:
    /// the worker's answer arrives through its call.
    async fn hand_over_on_drain(&self, worker: &WorkerProcess) -> Infallible {
        let mut leaving = self.drain_tx.subscribe();
        // The sender lives as long as the role.
        let _ = leaving.wait_for(|leaving| *leaving).await;
        if self.config.engine.can_hand_over() {
            worker.request_exit();
        }
        std::future::pending().await
    }

    /// Returns true if the agent drains and the engine can hand over.
    fn is_handing_over(&self) -> bool {
        *self.drain_tx.borrow() && self.config.engine.can_hand_over()
    }

    /// Returns [`JobError::Stopped`] if the agent drains. Otherwise another program sent SIGTERM,
    /// and the error is retryable.
    fn interruption_error(&self) -> JobError {
        if self.is_handing_over() {
            return JobError::Stopped;
        }
        JobError::retryable_failure(anyhow!(
            "the training was ended by SIGTERM after it saved its state; it is resumed (E112)"
        ))
    }
}

/// Fails if this host cannot train on a quantised base. Another host may.
fn check_quantization(order: &v1::TrainOrder, config: &TrainerConfig) -> Result<(), JobError> {
    let profile = &config.launch.profile;
    let reason = match &config.engine {
        _ if !memory_needs::is_quantized(order) => return Ok(()),
        TrainingEngine::Candle => {
            "the embedded engine trains on no quantised base; start this agent with \
             --trainer-engine pytorch"
                .to_owned()
        }
        TrainingEngine::PyTorch(_) if profile.quantisation == SupportLevel::Refuse => {
            format!("hardware profile {} refuses quantised weights", profile.name)
        }
        TrainingEngine::PyTorch(_) => return Ok(()),
    };
    let what = "or train without lora.quantize";
    Err(JobError::host_unfit(anyhow!("{reason}, use another box, {what} (E115)")))
}

/// Returns a label of the run and cycle, such as `raft-1 c2`.
fn cycle_label(job: &LeasedJob, order: &v1::TrainOrder) -> String {
    format!("{} c{}", job.run, order.cycle)
}

fn expect_train_order(job: &LeasedJob) -> Result<&v1::TrainOrder, JobError> {
    match &job.record.fact.body {
        FactBody::TrainOrder(order) => Ok(order),
        _ => Err(JobError::fatal_failure(anyhow!("not a train order (E111)"))),
    }
}

impl AgentRole for TrainerRole {
    fn work_kind(&self) -> WorkKind {
        WorkKind::Train
    }

    fn wait_for_room(&self) -> BoxFuture<'_, ()> {
        // The permit is released at once; the job acquires it again.
        async { drop(self.training_permit.acquire().await) }.boxed()
    }

    fn uses_gpu(&self) -> bool {
        self.config.uses_gpu()
    }

    fn memory_needs<'a>(
        &'a self,
        job: &'a LeasedJob,
    ) -> BoxFuture<'a, Result<Option<MemoryNeeds>, JobError>> {
        async {
            let order = expect_train_order(job)?;
            let halvings = self.halving_count(&cycle_label(job, order));
            let training = training_name(order, halvings);
            self.kept_worker.end_others(&training);
            let has_room = self.kept_worker.serves_training(&training);
            if is_part_done(job, order).await? || has_room {
                return Ok(None);
            }
            let lineage = TrainingLineage { job, order, engine: self.config.engine.lineage_name() };
            if lineage.newest_checkpoint().await?.is_some_and(|newest| newest.r#final) {
                return Ok(None);
            }
            memory_needs::estimate_needs(job, order, &self.config).await
        }
        .boxed()
    }

    fn describe_engine(&self) -> String {
        self.config.engine.describe_engine()
    }

    /// PyTorch trains all models that its transformers knows.
    fn list_abilities(&self) -> Vec<String> {
        let any = matches!(self.config.engine, TrainingEngine::PyTorch(_));
        any.then(|| wire::ANY_MODEL_ABILITY.to_owned()).into_iter().collect()
    }

    fn training_speed(&self) -> Option<TrainingSpeed> {
        self.last_speed.last_speed()
    }

    fn begin_drain(&self) {
        self.kept_worker.end_worker();
        self.drain_tx.send_replace(true);
    }

    fn grace(&self) -> Duration {
        self.config.grace
    }

    fn run<'a>(&'a self, job: &'a LeasedJob) -> BoxFuture<'a, Result<(), JobError>> {
        self.train_order(job).boxed()
    }
}
