//! A worker process that has one policy loaded at a time, and the calls to it.

use std::{
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use agent::{
    JobError, LeasedJob, PrefetchedCheckpoint, WorkerError, WorkerLauncher, WorkerProcess,
};
use anyhow::anyhow;
use futures::future::ready;
use store::CachedTree;
use tokio::sync::{RwLock, RwLockReadGuard};
use wire::{CANARY_TOLERANCE, WorkKind, v1};

use crate::{
    EngineCalibration, GeneratorBackend, OfflinePolicy,
    calibration::ChosenEngine,
    job_isolation::JobIsolation,
    messages::{AdapterSwapRequest, GenerateProgress, GeneratorAnswer, GeneratorRequest},
    worker_command::{
        PROGRESS_TIMEOUT, PROGRESS_TIMEOUT_MIN, PolicyFiles, PolicyKey, worker_command,
    },
};

/// The settings of a worker.
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

impl GeneratorConfig {
    /// Yields the engines that may be used.
    fn backends(&self) -> impl Iterator<Item = &GeneratorBackend> {
        let timed = self.calibration.iter().flat_map(EngineCalibration::backends);
        std::iter::once(&self.backend).chain(timed)
    }
}

/// A worker with one policy (base and adapter) loaded:
///
/// - a call for the loaded policy is sent to the worker at once, also while others run;
/// - a call for another policy waits until the running calls end, then swaps the adapter or
///   restarts the worker;
/// - a checkpoint that the next calls may need is loaded early if the worker is idle.
///
/// After a worker died while it served several calls, the next 16 jobs should run one at a time,
/// each with one call at a time, so that the one at fault fails alone.
pub struct PolicyWorker {
    config: GeneratorConfig,
    kind: WorkKind,
    /// The engine of the last base, if one is chosen by its speed.
    chosen: Mutex<Option<ChosenEngine>>,
    loaded: RwLock<Option<LoadedWorker>>,
    /// The calls that the worker has not answered.
    in_flight: AtomicU32,
    calls_begun: AtomicU64,
    isolation: JobIsolation,
}

/// A worker that stays loaded while this is held.
pub type LoadedWorkerGuard<'a> = RwLockReadGuard<'a, LoadedWorker>;

/// A worker and the policy that it has loaded.
pub struct LoadedWorker {
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

impl PolicyWorker {
    /// Creates it without a worker; the first call starts one, with the log of this kind of work.
    pub fn new(config: GeneratorConfig, kind: WorkKind) -> Self {
        Self {
            config,
            kind,
            chosen: Mutex::new(None),
            loaded: RwLock::new(None),
            in_flight: AtomicU32::new(0),
            calls_begun: AtomicU64::new(0),
            isolation: JobIsolation::default(),
        }
    }

    /// Returns the settings.
    pub fn config(&self) -> &GeneratorConfig {
        &self.config
    }

    /// Returns true if jobs should run one at a time.
    pub(crate) fn is_isolating(&self) -> bool {
        self.isolation.is_active()
    }

    /// Returns the number of calls that a job may send at once, at least 1.
    pub(crate) fn calls_at_once(&self) -> usize {
        self.isolation.limit_calls(self.config.slots)
    }

    /// Records that all calls of a job were answered.
    pub fn record_answered_job(&self) {
        self.isolation.record_answered_job();
    }

    /// Returns true if the worker uses the GPU.
    pub fn uses_gpu(&self) -> bool {
        matches!(self.config.backend, GeneratorBackend::LlamaCpp(_))
            && !self.config.launch.profile.is_cpu()
    }

    /// Describes the engine for users.
    pub fn describe_engine(&self) -> String {
        let chosen = self.chosen().map(|chosen| chosen.description);
        chosen.unwrap_or_else(|| self.config.backend.describe_engine())
    }

    /// Sends a request to a loaded worker and waits for its answer. `on_progress` receives the
    /// samples done.
    ///
    /// # Errors
    /// When the worker refuses the request, hangs or ends, or this host cannot serve it now.
    pub async fn call(
        &self,
        loaded: &LoadedWorkerGuard<'_>,
        request: &GeneratorRequest,
        mut on_progress: impl FnMut(u32) + Send,
    ) -> Result<GeneratorAnswer, JobError> {
        let worker = &loaded.worker;
        let mut call = WorkerCallGuard::begin_call(self, worker);
        let launch = &self.config.launch;
        let mut silence = launch.silence_timeout(PROGRESS_TIMEOUT, PROGRESS_TIMEOUT_MIN);
        let answer: Result<GeneratorAnswer, _> = worker
            .call_with_progress(request, &mut silence, |progress| {
                if let Ok(GenerateProgress { samples }) = serde_json::from_value(progress) {
                    on_progress(samples);
                }
                ready(())
            })
            .await;
        call.answered = true;
        let alone = call.was_only_call();
        match answer {
            Ok(GeneratorAnswer::NotHere(why)) => Err(JobError::host_unfit(anyhow!(why))),
            Ok(answer) => Ok(answer),
            Err(error @ WorkerError::Refused(_)) => {
                Err(JobError::from_model_worker(error, worker).await)
            }
            Err(error) => {
                // The worker hangs or sends invalid replies, so the next job starts a new one.
                worker.kill_group();
                let failed = JobError::from_model_worker(error, worker).await;
                if alone {
                    return Err(failed);
                }
                self.isolation.begin();
                Err(failed.blame_shared_worker())
            }
        }
    }

    /// Loads a policy unless it is loaded. One is loaded at a time: a change waits for the calls in flight, but the files are
    /// fetched before that.
    ///
    /// # Errors
    /// When files cannot be fetched, or the worker cannot be started.
    pub async fn ensure_loaded(
        &self,
        job: &LeasedJob,
        base: &v1::Tree,
        adapter: Option<&v1::Tree>,
    ) -> Result<LoadedWorkerGuard<'_>, JobError> {
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
    pub(crate) async fn prefetch_adapter(&self, ahead: &PrefetchedCheckpoint) -> Option<()> {
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
                if let Some(base) = load.base {
                    require_converters(&self.config, base).await?;
                }
                let (launch, backend) = self.choose_engine(&load, tolerance, progress).await?;
                if let (GeneratorBackend::Candle, Some(base)) = (&backend, load.base) {
                    require_embedded(base).await?;
                }
                let command = worker_command(&launch, &backend, &load, (self.kind, *slots))
                    .map_err(JobError::retryable_failure)?;
                (WorkerProcess::start(&command)?, tolerance)
            }
        };
        Ok(LoadedWorker { policy, tolerance, worker, _files: (base, adapter) })
    }

    /// Lists the ability to run models outside of the table of architectures, if this host has it.
    pub fn list_abilities(&self) -> Vec<String> {
        let any = self.config.backends().any(GeneratorBackend::takes_any_model);
        any.then(|| wire::ANY_MODEL_ABILITY.to_owned()).into_iter().collect()
    }

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
    /// speeds of the base are known, times all engines while nothing else runs.
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

/// Fails if llama.cpp needs converters for the model that this host lacks. Another host may have
/// them.
async fn require_converters(config: &GeneratorConfig, base: &Path) -> Result<(), JobError> {
    let llama = config.backends().find_map(|backend| match backend {
        GeneratorBackend::LlamaCpp(llama) => Some(llama.converters.clone()),
        GeneratorBackend::Candle | GeneratorBackend::Endpoint(_) => None,
    });
    let Some(converters) = llama else { return Ok(()) };
    let base = base.to_owned();
    let check = move || llama::require_converters(&base, converters.as_ref());
    let checked = tokio::task::spawn_blocking(check).await.map_err(JobError::retryable_failure)?;
    checked.map_err(JobError::host_unfit)
}

/// Fails if only another engine computes the model, which another host may have.
async fn require_embedded(base: &Path) -> Result<(), JobError> {
    let base = base.to_owned();
    let check = move || engine::check_architecture(&base);
    let checked = tokio::task::spawn_blocking(check).await.map_err(JobError::retryable_failure)?;
    checked.map_err(JobError::host_unfit)
}

/// Returns `None` if the worker did not load the adapter.
async fn swap_adapter(
    launch: &WorkerLauncher,
    worker: WorkerProcess,
    policy: &PolicyFiles<'_>,
) -> Option<WorkerProcess> {
    let request =
        GeneratorRequest::Adopt(AdapterSwapRequest { adapter: policy.adapter.map(Path::to_owned) });
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

/// A call to a worker in progress. If the last one is dropped without an answer (its run was
/// cancelled), the worker is killed, because its samples would be useless.
struct WorkerCallGuard<'a> {
    policies: &'a PolicyWorker,
    worker: &'a WorkerProcess,
    answered: bool,
    number: u64,
    /// True if it was the only call when it began.
    began_alone: bool,
}

impl<'a> WorkerCallGuard<'a> {
    fn begin_call(policies: &'a PolicyWorker, worker: &'a WorkerProcess) -> Self {
        let began_alone = policies.in_flight.fetch_add(1, Ordering::Relaxed) == 0;
        let number = policies.calls_begun.fetch_add(1, Ordering::Relaxed) + 1;
        Self { policies, worker, answered: false, number, began_alone }
    }

    /// Returns true if the worker had no other call since this one began.
    fn was_only_call(&self) -> bool {
        self.began_alone && self.policies.calls_begun.load(Ordering::Relaxed) == self.number
    }
}

impl Drop for WorkerCallGuard<'_> {
    fn drop(&mut self) {
        let others = self.policies.in_flight.fetch_sub(1, Ordering::Relaxed) - 1;
        if others == 0 && !self.answered {
            self.worker.kill_group();
        }
    }
}
