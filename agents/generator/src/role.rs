//! The agent's side: one warm worker, which has one policy at a time; orders in, samples out.

use std::{
    ffi::OsString,
    path::Path,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use anyhow::anyhow;
use futures::future::{BoxFuture, FutureExt, ready};
use runtime::{Ahead, Command, Job, JobError, Launch, Pace, Role, Worker, WorkerError};
use store::CachedTree;
use tokio::sync::{RwLock, RwLockReadGuard, watch};
use wire::{Body, Place, WorkKind, v1};

use crate::{
    Backend,
    calls::{Adopt, Answer, Done, Generate, Generated, Request, samples_of},
    rate::Rate,
};

/// A worker that reports nothing for so long is hung.
pub(crate) const SILENCE: Duration = Duration::from_secs(300);

/// However quick it was before, a worker may take so long.
pub(crate) const SILENCE_MIN: Duration = Duration::from_secs(60);

/// Jobs taken one at a time after a worker died over several.
const SUSPECTS: u32 = 16;

/// How a generator works.
#[derive(Debug, Clone)]
pub struct Config {
    pub launch: Launch,
    pub backend: Backend,
    /// Sequences the worker runs at once.
    pub slots: u32,
}

/// The generator role of an agent.
pub struct GeneratorRole {
    config: Config,
    warm: RwLock<Option<Warm>>,
    /// Samples of held jobs that are not yet done.
    outstanding: watch::Sender<u32>,
    /// Calls the workers have not answered.
    in_flight: AtomicU32,
    /// Calls begun so far.
    begun: AtomicU64,
    /// Jobs still to be taken one at a time: a worker died over several.
    alone: AtomicU32,
    rate: Rate,
}

/// A worker and the policy it has loaded.
struct Warm {
    policy: Key,
    worker: Worker,
    /// What it has loaded, or is loading: not to be evicted meanwhile.
    _files: (Option<CachedTree>, Option<CachedTree>),
}

/// Manifest digests of base and adapter.
type Key = (String, String);

impl Warm {
    fn serves(&self, policy: &Key) -> bool {
        self.policy == *policy && self.worker.is_alive()
    }
}

impl GeneratorRole {
    pub fn new(config: Config) -> Self {
        Self {
            config,
            warm: RwLock::new(None),
            outstanding: watch::Sender::new(0),
            in_flight: AtomicU32::new(0),
            begun: AtomicU64::new(0),
            alone: AtomicU32::new(0),
            rate: Rate::default(),
        }
    }

    async fn generate(&self, job: &Job) -> Result<(), JobError> {
        let Body::GenerateOrder(order) = &job.record.fact.body else {
            return Err(JobError::fatal(anyhow!("not a generate order (E111)")));
        };
        let place =
            Place::Samples { cycle: order.cycle, job: order.job.parse().map_err(JobError::fatal)? };
        if !self.config.backend.is_verified() && !order.accept_unverified_policy {
            return Err(JobError::not_here(anyhow!(
                "{} must not generate for run {}: nobody can check its weights, and the run's \
                 spec lacks `raft.accept_unverified_policy: true` (E114)",
                self.config.backend.describe(),
                order.run
            )));
        }
        let total = samples_of(&order.requests).map_err(|why| JobError::fatal(anyhow!(why)))?;
        let mut share = Share::take(&self.outstanding, total);
        if job.is_written(place.clone()).await? {
            return Ok(());
        }
        let warm = self.warm(job, order).await?;
        let mut call = InFlight::begin(self, &warm.worker);
        let (held, began) = (self.rate.hold(), Instant::now());
        let request = Request::Generate(Generate {
            sampling: order.sampling.unwrap_or_default(),
            seed: order.seed,
            requests: order.requests.clone(),
            logprobs: order.logprobs,
            canary: order.canary.clone(),
        });
        let generated: Result<Answer, _> = warm
            .worker
            .call(&request, &mut self.config.launch.patience(SILENCE, SILENCE_MIN), |progress| {
                if let Ok(Done { samples }) = serde_json::from_value(progress) {
                    share.done(samples);
                    job.progress.set(samples, total, "samples");
                }
                ready(())
            })
            .await;
        call.answered = true;
        let alone = call.was_alone();
        let generated = match generated {
            Ok(Answer::Generated(generated)) => generated,
            Ok(Answer::NotHere(why)) => return Err(JobError::not_here(anyhow!(why))),
            Ok(Answer::Adopted) => {
                return Err(JobError::retry(anyhow!("the worker answered something else (E107)")));
            }
            Err(error @ WorkerError::Refused(_)) => {
                return Err(JobError::of_model_worker(error, &warm.worker).await);
            }
            Err(error) => {
                // It hangs or talks nonsense: a new one may fare better.
                warm.worker.kill();
                let failed = JobError::of_model_worker(error, &warm.worker).await;
                return Err(if alone { failed } else { self.suspect_all(failed) });
            }
        };
        self.trust_one();
        held.made(&generated.samples);
        let body = report(job, order, generated, began.elapsed());
        job.write(place, Body::Samples(body)).await
    }

    /// A worker died over several jobs: they are tried one at a time, so that the one at
    /// fault, if one is, does not take the others with it.
    fn suspect_all(&self, failed: JobError) -> JobError {
        self.alone.store(SUSPECTS, Ordering::Relaxed);
        failed.in_company()
    }

    fn trust_one(&self) {
        let less = |alone: u32| alone.checked_sub(1);
        // None left is as good.
        let _ = self.alone.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// The worker with this policy. One policy is loaded at a time: a switch waits for the
    /// calls in flight, but not for its files with them.
    async fn warm(
        &self,
        job: &Job,
        order: &v1::GenerateOrder,
    ) -> Result<RwLockReadGuard<'_, Warm>, JobError> {
        let base = order.base.as_ref();
        let base =
            base.ok_or_else(|| JobError::fatal(anyhow!("the order names no base (E111)")))?;
        let adapter = order.adapter.as_ref();
        let policy =
            (base.manifest.clone(), adapter.map_or(String::new(), |tree| tree.manifest.clone()));
        let warm = self.warm.read().await;
        if warm.as_ref().is_some_and(|warm| warm.serves(&policy)) {
            return loaded(warm);
        }
        drop(warm);
        let base = match self.config.backend.is_verified() {
            true => Some(job.cache.tree(&job.store, base).await?),
            // What it serves it has already.
            false => None,
        };
        let adapter = job.tree_if(adapter).await?;
        let mut warm = self.warm.write().await;
        if !warm.as_ref().is_some_and(|warm| warm.serves(&policy)) {
            // A switch that is given up leaves nothing behind that might be half done.
            let last = warm.take();
            *warm = Some(self.switch(last, policy, base, adapter).await?);
        }
        loaded(warm.downgrade())
    }

    /// Loads an adapter that the next orders may ask for where its base is loaded and nobody draws,
    /// or waits to draw, with another. `None`: it stays as it is.
    async fn load_ahead(&self, ahead: &Ahead) -> Option<()> {
        let v1::Checkpoint { base: Some(base), tree: Some(adapter), .. } = &ahead.checkpoint else {
            return None;
        };
        let policy = (base.manifest.clone(), adapter.manifest.clone());
        let (base, adapter) = (ahead.tree(base).await.ok()?, ahead.tree(adapter).await.ok()?);
        let mut warm = self.warm.try_write().ok()?;
        let other = |warm: &mut Warm| self.adopts(warm, &policy.0) && !warm.serves(&policy);
        let last = warm.take_if(other)?;
        *warm = self.switch(Some(last), policy, Some(base), Some(adapter)).await.ok();
        Some(())
    }

    /// Whether a worker can be given another adapter of a base.
    fn adopts(&self, warm: &Warm, base: &str) -> bool {
        self.config.backend.adopts() && warm.policy.0 == base && warm.worker.is_alive()
    }

    /// Gives the adapter to the worker that has its base, where that can be; otherwise ends it
    /// before it starts another.
    async fn switch(
        &self,
        last: Option<Warm>,
        policy: Key,
        base: Option<CachedTree>,
        adapter: Option<CachedTree>,
    ) -> Result<Warm, JobError> {
        let Config { launch, backend, slots } = &self.config;
        let load = Policy {
            key: &policy,
            base: base.as_ref().map(|tree| tree.path()),
            adapter: adapter.as_ref().map(|tree| tree.path()),
        };
        let worker = match last.filter(|last| self.adopts(last, &policy.0)) {
            Some(last) => adopt(launch, last.worker, &load).await,
            None => None,
        };
        let worker = match worker {
            Some(worker) => worker,
            None => {
                let command = command(launch, backend, &load, *slots).map_err(JobError::retry)?;
                Worker::start(&command)?
            }
        };
        Ok(Warm { policy, worker, _files: (base, adapter) })
    }
}

/// The worker, with the adapter; `None` when it did not take it.
async fn adopt(launch: &Launch, worker: Worker, policy: &Policy<'_>) -> Option<Worker> {
    let request = Request::Adopt(Adopt { adapter: policy.adapter.map(Path::to_owned) });
    let mut patience = launch.patience(SILENCE, SILENCE_MIN);
    match worker.call::<Answer, _>(&request, &mut patience, |_| ready(())).await {
        Ok(Answer::Adopted) => Some(worker),
        Ok(_) => None,
        Err(error) => {
            // Another tells the job what is wrong, if it is with the adapter.
            tracing::warn!(%error, "a worker did not take an adapter; another is started");
            None
        }
    }
}

/// What a worker is to load.
pub(crate) struct Policy<'a> {
    /// What base and adapter are known by.
    pub key: &'a Key,
    pub base: Option<&'a Path>,
    pub adapter: Option<&'a Path>,
}

/// How its worker is started.
pub(crate) fn command(
    launch: &Launch,
    backend: &Backend,
    policy: &Policy<'_>,
    slots: u32,
) -> serde_json::Result<Command> {
    let mut arguments: Vec<OsString> = Vec::new();
    arguments.extend(["--backend".into(), serde_json::to_string(backend)?.into()]);
    for (name, path) in [("--base", policy.base), ("--adapter", policy.adapter)] {
        arguments.extend(path.into_iter().flat_map(|path| [name.into(), path.into()]));
    }
    let (base, adapter) = policy.key;
    arguments.extend(["--base-key".into(), base.into()]);
    arguments.extend(["--adapter-key".into(), adapter.into()]);
    arguments.extend(["--slots".into(), slots.to_string().into()]);
    Ok(launch.worker("generate", "generate", arguments))
}

fn loaded(warm: RwLockReadGuard<'_, Option<Warm>>) -> Result<RwLockReadGuard<'_, Warm>, JobError> {
    let none = |_| JobError::retry(anyhow!("the worker is gone (E107)"));
    RwLockReadGuard::try_map(warm, Option::as_ref).map_err(none)
}

fn report(
    job: &Job,
    order: &v1::GenerateOrder,
    Generated { samples, engine, caveat, tokenizer, canary }: Generated,
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
        joules: job.joules().unwrap_or(0.0),
        suite: order.suite.clone(),
        tokenizer,
        canary,
    }
}

impl Role for GeneratorRole {
    fn kind(&self) -> WorkKind {
        WorkKind::Generate
    }

    /// There is room while the held jobs cannot fill all slots.
    fn room(&self) -> BoxFuture<'_, ()> {
        async {
            let mut outstanding = self.outstanding.subscribe();
            // The sender lives as long as the role.
            let room = |samples: &u32| {
                let alone = self.alone.load(Ordering::Relaxed) > 0;
                *samples < if alone { 1 } else { self.config.slots }
            };
            let _ = outstanding.wait_for(room).await;
        }
        .boxed()
    }

    fn run<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<(), JobError>> {
        self.generate(job).boxed()
    }

    fn foresee<'a>(&'a self, ahead: &'a Ahead) -> BoxFuture<'a, ()> {
        self.load_ahead(ahead).map(|_| ()).boxed()
    }

    fn uses_gpu(&self) -> bool {
        matches!(self.config.backend, Backend::LlamaCpp(_)) && !self.config.launch.profile.is_cpu()
    }

    fn engine(&self) -> String {
        self.config.backend.describe()
    }

    fn pace(&self) -> Option<Pace> {
        Some(self.rate.pace(self.config.slots))
    }
}

/// A job's part of the outstanding samples, given back as they are done or dropped.
struct Share<'a> {
    outstanding: &'a watch::Sender<u32>,
    left: u32,
    total: u32,
}

impl<'a> Share<'a> {
    fn take(outstanding: &'a watch::Sender<u32>, total: u32) -> Self {
        outstanding.send_modify(|samples| *samples += total);
        Self { outstanding, left: total, total }
    }

    fn done(&mut self, samples: u32) {
        let left = self.total.saturating_sub(samples).min(self.left);
        let freed = self.left - left;
        self.left = left;
        self.outstanding.send_modify(|samples| *samples -= freed);
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.done(self.total);
    }
}

/// A call to a worker. When the last one is given up (its run was cancelled), so is the
/// worker: it would generate on for nobody.
struct InFlight<'a> {
    role: &'a GeneratorRole,
    worker: &'a Worker,
    answered: bool,
    /// Its number, and whether it was the only one when it began.
    number: u64,
    first: bool,
}

impl<'a> InFlight<'a> {
    fn begin(role: &'a GeneratorRole, worker: &'a Worker) -> Self {
        let first = role.in_flight.fetch_add(1, Ordering::Relaxed) == 0;
        let number = role.begun.fetch_add(1, Ordering::Relaxed) + 1;
        Self { role, worker, answered: false, number, first }
    }

    /// Whether the worker had no other call since this one began.
    fn was_alone(&self) -> bool {
        self.first && self.role.begun.load(Ordering::Relaxed) == self.number
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let others = self.role.in_flight.fetch_sub(1, Ordering::Relaxed) - 1;
        if others == 0 && !self.answered {
            self.worker.kill();
        }
    }
}
