//! The agent's side: one warm worker, which has one policy loaded at a time, turns orders into
//! samples.

use std::{
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use agent::{
    AgentRole, JobError, LeasedJob, PrefetchedCheckpoint, SamplingThroughput, WorkerError,
    WorkerLauncher, WorkerProcess,
};
use anyhow::anyhow;
use futures::future::{BoxFuture, FutureExt, ready};
use store::CachedTree;
use tokio::sync::{RwLock, RwLockReadGuard, watch};
use wire::{CANARY_TOLERANCE, FactBody, FactKey, WorkKind, v1};

use crate::{
    EngineCalibration, GeneratorBackend, OfflinePolicy,
    calibration::ChosenEngine,
    messages::{
        AdoptRequest, GenerateProgress, GenerateRequest, GeneratedSamples, GeneratorAnswer,
        GeneratorRequest, count_samples,
    },
    throughput_meter::ThroughputMeter,
    worker_command::{
        PROGRESS_TIMEOUT, PROGRESS_TIMEOUT_MIN, PolicyFiles, PolicyKey, worker_command,
    },
};

/// Jobs that run one at a time after a worker died while it served several.
const ISOLATED_JOBS: u32 = 16;

/// The settings of a generator.
#[derive(Debug, Clone)]
pub struct GeneratorConfig {
    pub launch: WorkerLauncher,
    pub backend: GeneratorBackend,
    /// The engines among which the fastest on a base is used instead of `backend`; `None` for no
    /// choice.
    pub calibration: Option<EngineCalibration>,
    /// The number of sequences that the worker runs at once.
    pub slots: u32,
}

/// The generator role of an agent.
///
/// It keeps one worker with one policy (base and adapter) loaded:
///
/// - an order for the loaded policy is sent to the worker at once, also while others run;
/// - an order for another policy waits until the running calls end, then swaps the adapter or
///   restarts the worker;
/// - a checkpoint that the next orders may need is loaded early if the worker is idle.
///
/// It takes jobs while the held ones cannot fill all slots. After a worker died while it served
/// several jobs, the next 16 jobs run one at a time, so that the job at fault fails alone.
pub struct GeneratorRole {
    config: GeneratorConfig,
    /// The engine of the last base, if one is chosen by its speed.
    chosen: Mutex<Option<ChosenEngine>>,
    loaded: RwLock<Option<LoadedWorker>>,
    /// The samples of held jobs that are not done yet.
    outstanding: watch::Sender<u32>,
    /// The calls that the worker has not answered.
    in_flight: AtomicU32,
    calls_begun: AtomicU64,
    /// The jobs that must still run one at a time, after a worker died while it served several.
    isolated_remaining: AtomicU32,
    throughput: ThroughputMeter,
}

struct LoadedWorker {
    policy: PolicyKey,
    /// The largest distance that was accepted when its engine was chosen, in nats per token.
    tolerance: f64,
    worker: WorkerProcess,
    /// Kept in use, loaded or being loaded, so that they are not evicted.
    _files: (Option<CachedTree>, Option<CachedTree>),
}

impl LoadedWorker {
    fn has_policy(&self, policy: &PolicyKey, tolerance: f64) -> bool {
        self.policy == *policy && self.tolerance <= tolerance && self.worker.is_alive()
    }
}

impl GeneratorRole {
    /// Creates the role without a worker; the first order starts it.
    pub fn new(config: GeneratorConfig) -> Self {
        Self {
            config,
            chosen: Mutex::new(None),
            loaded: RwLock::new(None),
            outstanding: watch::Sender::new(0),
            in_flight: AtomicU32::new(0),
            calls_begun: AtomicU64::new(0),
            isolated_remaining: AtomicU32::new(0),
            throughput: ThroughputMeter::default(),
        }
    }

    /// Draws the samples of an order and writes them, unless the log contains them already.
    async fn generate_samples(&self, job: &LeasedJob) -> Result<(), JobError> {
        let FactBody::GenerateOrder(order) = &job.record.fact.body else {
            return Err(JobError::fatal_failure(anyhow!("not a generate order (E111)")));
        };
        let place = FactKey::Samples {
            cycle: order.cycle,
            job: order.job.parse().map_err(JobError::fatal_failure)?,
        };
        if !self.config.backend.has_verified_weights() && !order.accept_unverified_policy {
            return Err(JobError::host_unfit(anyhow!(
                "{} must not generate for run {}: its weights cannot be verified; set \
                 `raft.accept_unverified_policy: true` in the run's spec, or use another engine \
                 (E114)",
                self.config.backend.describe_engine(),
                order.run
            )));
        }
        let total =
            count_samples(&order.requests).map_err(|why| JobError::fatal_failure(anyhow!(why)))?;
        let mut share = OutstandingShare::add_outstanding(&self.outstanding, total);
        if job.is_written(place.clone()).await? {
            return Ok(());
        }
        let warm = self.ensure_loaded(job, order).await?;
        let mut call = WorkerCallGuard::begin_call(self, &warm.worker);
        let (held, began) = (self.throughput.start_job(), Instant::now());
        let request = GeneratorRequest::Generate(GenerateRequest {
            sampling: order.sampling.unwrap_or_default(),
            seed: order.seed,
            requests: order.requests.clone(),
            logprobs: order.logprobs,
            token_logprobs: order.token_logprobs,
            canary: order.canary.clone(),
        });
        let launch = &self.config.launch;
        let mut silence = launch.silence_timeout(PROGRESS_TIMEOUT, PROGRESS_TIMEOUT_MIN);
        let on_progress = |progress| {
            if let Ok(GenerateProgress { samples }) = serde_json::from_value(progress) {
                share.set_done(samples);
                job.progress.set_progress(samples, total, "samples");
            }
            ready(())
        };
        let generated: Result<GeneratorAnswer, _> =
            warm.worker.call_with_progress(&request, &mut silence, on_progress).await;
        call.answered = true;
        let alone = call.was_only_call();
        let generated = match generated {
            Ok(GeneratorAnswer::Generated(generated)) => generated,
            Ok(GeneratorAnswer::NotHere(why)) => return Err(JobError::host_unfit(anyhow!(why))),
            Ok(GeneratorAnswer::Adopted) => {
                return Err(JobError::retryable_failure(anyhow!(
                    "unexpected answer from the worker (E107)"
                )));
            }
            Err(error @ WorkerError::Refused(_)) => {
                return Err(JobError::from_model_worker(error, &warm.worker).await);
            }
            Err(error) => {
                // The worker hangs or sends invalid replies, so the next job starts a new one.
                warm.worker.kill_group();
                let failed = JobError::from_model_worker(error, &warm.worker).await;
                return Err(if alone { failed } else { self.isolate_jobs(failed) });
            }
        };
        self.end_isolation_step();
        held.finish_samples(&generated.samples);
        let body = build_samples(job, order, generated, began.elapsed());
        job.write_result(place, FactBody::Samples(body)).await
    }

    /// Runs the next jobs one at a time after a worker died while it served several, so that a job
    /// at fault fails alone.
    fn isolate_jobs(&self, failed: JobError) -> JobError {
        self.isolated_remaining.store(ISOLATED_JOBS, Ordering::Relaxed);
        failed.blame_shared_worker()
    }

    fn end_isolation_step(&self) {
        let less = |alone: u32| alone.checked_sub(1);
        // The update fails only if no isolated job remains.
        let _ = self.isolated_remaining.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// One policy is loaded at a time: a change waits for the calls in flight, but the files are
    /// fetched before that.
    async fn ensure_loaded(
        &self,
        job: &LeasedJob,
        order: &v1::GenerateOrder,
    ) -> Result<RwLockReadGuard<'_, LoadedWorker>, JobError> {
        let base = order.base.as_ref();
        let base =
            base.ok_or_else(|| JobError::fatal_failure(anyhow!("the order names no base (E111)")))?;
        let adapter = order.adapter.as_ref();
        let policy =
            (base.manifest.clone(), adapter.map_or(String::new(), |tree| tree.manifest.clone()));
        let tolerance = self.read_tolerance(job).await?;
        let warm = self.loaded.read().await;
        if warm.as_ref().is_some_and(|warm| warm.has_policy(&policy, tolerance)) {
            return require_worker(warm);
        }
        drop(warm);
        let base = match self.config.backend.has_verified_weights() {
            true => Some(job.cache.fetch_tree(&job.store, base).await?),
            // An external server has its own copy.
            false => None,
        };
        let adapter = job.fetch_optional_tree(adapter).await?;
        let mut warm = self.loaded.write().await;
        if !warm.as_ref().is_some_and(|warm| warm.has_policy(&policy, tolerance)) {
            // The old worker is taken first, so that a cancelled change leaves no half-loaded
            // worker.
            let last = warm.take();
            let progress = |done, total| {
                let count = |number| u32::try_from(number).unwrap_or(u32::MAX);
                job.progress.set_progress(count(done), count(total), "engines timed");
            };
            *warm =
                Some(self.load_policy(last, policy, (base, adapter), tolerance, progress).await?);
        }
        require_worker(warm.downgrade())
    }

    /// Loads an adapter that the next orders may need, if its base is loaded and no order draws
    /// with the current one or waits to. Returns `None` if the worker is unchanged.
    async fn prefetch_adapter(&self, ahead: &PrefetchedCheckpoint) -> Option<()> {
        let v1::Checkpoint { base: Some(base), tree: Some(adapter), .. } = &ahead.checkpoint else {
            return None;
        };
        let policy = (base.manifest.clone(), adapter.manifest.clone());
        let (base, adapter) =
            (ahead.fetch_tree(base).await.ok()?, ahead.fetch_tree(adapter).await.ok()?);
        let mut warm = self.loaded.try_write().ok()?;
        let tolerance = warm.as_ref()?.tolerance;
        let other = |warm: &mut LoadedWorker| {
            self.can_swap_adapter(warm, &policy.0, tolerance) && warm.policy != policy
        };
        let last = warm.take_if(other)?;
        let files = (Some(base), Some(adapter));
        *warm = self.load_policy(Some(last), policy, files, tolerance, |_, _| ()).await.ok();
        warm.as_ref()?;
        let adapter = ahead.checkpoint.tree.as_ref().map(|tree| &tree.manifest);
        tracing::info!(adapter, "loaded the adapter that the next orders may need");
        Some(())
    }

    fn can_swap_adapter(&self, warm: &LoadedWorker, base: &str, tolerance: f64) -> bool {
        let has_base = warm.policy.0 == base && warm.tolerance <= tolerance;
        self.config.backend.can_swap_adapter() && has_base && warm.worker.is_alive()
    }

    /// Swaps the adapter of a worker that has the base, if possible; otherwise ends that worker
    /// before it starts another.
    async fn load_policy(
        &self,
        last: Option<LoadedWorker>,
        policy: PolicyKey,
        (base, adapter): (Option<CachedTree>, Option<CachedTree>),
        tolerance: f64,
        progress: impl Fn(usize, usize),
    ) -> Result<LoadedWorker, JobError> {
        let GeneratorConfig { launch, slots, .. } = &self.config;
        let load = PolicyFiles {
            key: &policy,
            base: base.as_ref().map(|tree| tree.path()),
            adapter: adapter.as_ref().map(|tree| tree.path()),
        };
        let worker = match last.filter(|last| self.can_swap_adapter(last, &policy.0, tolerance)) {
            Some(last) => {
                let tolerance = last.tolerance;
                swap_adapter(launch, last.worker, &load).await.map(|worker| (worker, tolerance))
            }
            None => None,
        };
        let (worker, tolerance) = match worker {
            Some(worker) => worker,
            None => {
                let (launch, backend) = self.choose_engine(&load, tolerance, progress).await?;
                let command = worker_command(&launch, &backend, &load, *slots)
                    .map_err(JobError::retryable_failure)?;
                (WorkerProcess::start(&command)?, tolerance)
            }
        };
        Ok(LoadedWorker { policy, tolerance, worker, _files: (base, adapter) })
    }
}

impl GeneratorRole {
    /// Returns the largest distance from the ordered policy that the job's run accepts, in nats per
    /// token. It matters only where an engine is chosen.
    async fn read_tolerance(&self, job: &LeasedJob) -> Result<f64, JobError> {
        if self.config.calibration.is_none() {
            return Ok(CANARY_TOLERANCE);
        }
        let proof = match job.read_spec().await?.kind {
            Some(v1::spec::Kind::Raft(raft)) => raft.proof,
            _ => None,
        };
        Ok(proof.map_or(CANARY_TOLERANCE, |proof| proof.tolerance))
    }

    /// Returns the settings of a worker for a policy. If the engine is chosen by its speed, and no
    /// figures of the base are known, times all engines while nothing else runs.
    async fn choose_engine(
        &self,
        policy: &PolicyFiles<'_>,
        tolerance: f64,
        progress: impl Fn(usize, usize),
    ) -> Result<(WorkerLauncher, GeneratorBackend), JobError> {
        let GeneratorConfig { launch, backend, calibration, .. } = &self.config;
        let (Some(calibration), Some(base)) = (calibration, policy.base) else {
            return Ok((launch.clone(), backend.clone()));
        };
        let fits = |it: &ChosenEngine| it.base == policy.key.0 && it.tolerance == tolerance;
        let known = self.chosen().filter(fits);
        let chosen = match known {
            Some(chosen) => chosen,
            None => {
                let policy = OfflinePolicy {
                    base,
                    base_key: policy.key.0.clone(),
                    adapter: None,
                    adapter_key: String::new(),
                };
                let choice = calibration.choose_engine(launch, &policy, tolerance, progress).await;
                choice.map_err(JobError::retryable_failure)?
            }
        };
        *self.chosen.lock().unwrap_or_else(PoisonError::into_inner) = Some(chosen.clone());
        Ok((chosen.candidate.to_launcher(launch), chosen.candidate.backend))
    }

    fn chosen(&self) -> Option<ChosenEngine> {
        self.chosen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Returns `None` if the worker did not load the adapter.
async fn swap_adapter(
    launch: &WorkerLauncher,
    worker: WorkerProcess,
    policy: &PolicyFiles<'_>,
) -> Option<WorkerProcess> {
    let request =
        GeneratorRequest::Adopt(AdoptRequest { adapter: policy.adapter.map(Path::to_owned) });
    let mut patience = launch.silence_timeout(PROGRESS_TIMEOUT, PROGRESS_TIMEOUT_MIN);
    match worker
        .call_with_progress::<GeneratorAnswer, _>(&request, &mut patience, |_| ready(()))
        .await
    {
        Ok(GeneratorAnswer::Adopted) => Some(worker),
        Ok(_) => None,
        Err(error) => {
            // If the adapter is invalid, the new worker reports it to the job.
            tracing::warn!(%error, "worker did not load the adapter; starting another");
            None
        }
    }
}

fn require_worker(
    warm: RwLockReadGuard<'_, Option<LoadedWorker>>,
) -> Result<RwLockReadGuard<'_, LoadedWorker>, JobError> {
    let none = |_| JobError::retryable_failure(anyhow!("the worker has exited (E107)"));
    RwLockReadGuard::try_map(warm, Option::as_ref).map_err(none)
}

fn build_samples(
    job: &LeasedJob,
    order: &v1::GenerateOrder,
    GeneratedSamples { samples, engine, caveat, tokenizer, canary }: GeneratedSamples,
    wall: Duration,
) -> v1::Samples {
    let manifest =
        |tree: &Option<v1::Tree>| tree.as_ref().map_or(String::new(), |tree| tree.manifest.clone());
    v1::Samples {
        run: order.run.clone(),
        cycle: order.cycle,
        job: order.job.clone(),
        attempt: order.attempt,
        purpose: order.purpose,
        agent: job.agent.clone(),
        engine,
        base: manifest(&order.base),
        adapter: manifest(&order.adapter),
        samples,
        wall_s: wall.as_secs_f64(),
        caveat,
        joules: job.energy_joules().unwrap_or(0.0),
        suite: order.suite.clone(),
        tokenizer,
        canary,
    }
}

impl AgentRole for GeneratorRole {
    fn work_kind(&self) -> WorkKind {
        WorkKind::Generate
    }

    /// In isolation, waits until no samples are outstanding.
    fn wait_for_room(&self) -> BoxFuture<'_, ()> {
        async {
            let mut outstanding = self.outstanding.subscribe();
            // The sender lives as long as the role.
            let room = |samples: &u32| {
                let alone = self.isolated_remaining.load(Ordering::Relaxed) > 0;
                *samples < if alone { 1 } else { self.config.slots }
            };
            let _ = outstanding.wait_for(room).await;
        }
        .boxed()
    }

    fn run<'a>(&'a self, job: &'a LeasedJob) -> BoxFuture<'a, Result<(), JobError>> {
        self.generate_samples(job).boxed()
    }

    fn prefetch_checkpoint<'a>(&'a self, ahead: &'a PrefetchedCheckpoint) -> BoxFuture<'a, ()> {
        self.prefetch_adapter(ahead).map(|_| ()).boxed()
    }

    fn uses_gpu(&self) -> bool {
        matches!(self.config.backend, GeneratorBackend::LlamaCpp(_))
            && !self.config.launch.profile.is_cpu()
    }

    fn describe_engine(&self) -> String {
        let chosen = self.chosen().map(|chosen| chosen.description);
        chosen.unwrap_or_else(|| self.config.backend.describe_engine())
    }

    fn current_throughput(&self) -> Option<SamplingThroughput> {
        Some(self.throughput.current_throughput(self.config.slots))
    }
}

/// A job's share of the outstanding samples, subtracted as they are done or when this is dropped.
struct OutstandingShare<'a> {
    outstanding: &'a watch::Sender<u32>,
    remaining: u32,
    total: u32,
}

impl<'a> OutstandingShare<'a> {
    fn add_outstanding(outstanding: &'a watch::Sender<u32>, total: u32) -> Self {
        outstanding.send_modify(|samples| *samples += total);
        Self { outstanding, remaining: total, total }
    }

    /// Subtracts samples until `samples` of the job's total are done.
    fn set_done(&mut self, samples: u32) {
        let left = self.total.saturating_sub(samples).min(self.remaining);
        let freed = self.remaining - left;
        self.remaining = left;
        self.outstanding.send_modify(|samples| *samples -= freed);
    }
}

impl Drop for OutstandingShare<'_> {
    fn drop(&mut self) {
        self.set_done(self.total);
    }
}

/// A call to a worker in progress. If the last one is dropped without an answer (its run was
/// cancelled), the worker is killed, because its samples would be useless.
struct WorkerCallGuard<'a> {
    role: &'a GeneratorRole,
    worker: &'a WorkerProcess,
    answered: bool,
    number: u64,
    /// True if it was the only call when it began.
    began_alone: bool,
}

impl<'a> WorkerCallGuard<'a> {
    fn begin_call(role: &'a GeneratorRole, worker: &'a WorkerProcess) -> Self {
        let began_alone = role.in_flight.fetch_add(1, Ordering::Relaxed) == 0;
        let number = role.calls_begun.fetch_add(1, Ordering::Relaxed) + 1;
        Self { role, worker, answered: false, number, began_alone }
    }

    /// Returns true if the worker had no other call since this one began.
    fn was_only_call(&self) -> bool {
        self.began_alone && self.role.calls_begun.load(Ordering::Relaxed) == self.number
    }
}

impl Drop for WorkerCallGuard<'_> {
    fn drop(&mut self) {
        let others = self.role.in_flight.fetch_sub(1, Ordering::Relaxed) - 1;
        if others == 0 && !self.answered {
            self.worker.kill_group();
        }
    }
}
