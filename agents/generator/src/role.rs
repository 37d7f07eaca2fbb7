//! The agent's side: one warm worker, which has one policy loaded at a time, turns orders into
//! samples.

use std::time::{Duration, Instant};

use agent::{AgentRole, JobError, LeasedJob, PrefetchedCheckpoint, SamplingThroughput};
use anyhow::anyhow;
use futures::future::{BoxFuture, FutureExt};
use tokio::sync::watch;
use verifier::EnvironmentHost;
use wire::{FactBody, FactKey, WorkKind, v1};

use crate::{
    episodes::{EpisodePlayer, TurnWorker, unexpected_answer},
    messages::{
        GenerateRequest, GeneratedSamples, GeneratorAnswer, GeneratorRequest, count_samples,
    },
    policy_worker::{GeneratorConfig, PolicyWorker},
    throughput_meter::ThroughputMeter,
};

/// The generator role of an agent. It takes jobs while the held ones cannot fill all slots of its
/// [`PolicyWorker`].
pub struct GeneratorRole {
    policies: PolicyWorker,
    /// The samples of held jobs that are not done yet.
    outstanding: watch::Sender<u32>,
    throughput: ThroughputMeter,
    episodes: EpisodePlayer,
}

impl GeneratorRole {
    /// Creates the role without a worker; the first order starts it. Episodes are played with
    /// environments of `environments`.
    pub fn new(config: GeneratorConfig, environments: EnvironmentHost) -> Self {
        Self {
            episodes: EpisodePlayer::new(environments),
            policies: PolicyWorker::new(config, WorkKind::Generate),
            outstanding: watch::Sender::new(0),
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
        let backend = &self.policies.config().backend;
        if !backend.has_verified_weights() && !order.accept_unverified_policy {
            return Err(JobError::host_unfit(anyhow!(
                "{} must not generate for run {}: its weights cannot be verified; set \
                 `raft.accept_unverified_policy: true` in the run's spec, or use another engine \
                 (E114)",
                backend.describe_engine(),
                order.run
            )));
        }
        if order.episodes && !backend.draws_episodes() {
            return Err(JobError::host_unfit(anyhow!(
                "{} cannot draw the episodes of run {}: it does not continue given tokens; use the \
                 embedded engine or llama.cpp (E102)",
                backend.describe_engine(),
                order.run
            )));
        }
        let total =
            count_samples(&order.requests).map_err(|why| JobError::fatal_failure(anyhow!(why)))?;
        let mut share = OutstandingShare::add_outstanding(&self.outstanding, total);
        if job.is_written(place.clone()).await? {
            return Ok(());
        }
        let base = order.base.as_ref();
        let base =
            base.ok_or_else(|| JobError::fatal_failure(anyhow!("the order names no base (E111)")))?;
        let loaded = self.policies.ensure_loaded(job, base, order.adapter.as_ref()).await?;
        let (held, began) = (self.throughput.start_job(), Instant::now());
        let request = build_request(order);
        let on_progress = |samples| {
            share.set_done(samples);
            job.progress.set_progress(samples, total, "samples");
        };
        let generated = if order.episodes {
            let worker = TurnWorker { policies: &self.policies, loaded: &loaded };
            self.episodes.draw_episodes((job, order), worker, request, on_progress).await?
        } else {
            let request = GeneratorRequest::Generate(request);
            match self.policies.call(&loaded, &request, on_progress).await? {
                GeneratorAnswer::Generated(generated) => generated,
                _ => return Err(unexpected_answer()),
            }
        };
        self.policies.record_answered_job();
        held.finish_samples(&generated.samples);
        let body = build_samples(job, order, generated, began.elapsed());
        job.write_result(place, FactBody::Samples(body)).await
    }
}

fn build_request(order: &v1::GenerateOrder) -> GenerateRequest {
    GenerateRequest {
        sampling: order.sampling.unwrap_or_default(),
        seed: order.seed,
        requests: order.requests.clone(),
        logprobs: order.logprobs,
        token_logprobs: order.token_logprobs,
        canary: order.canary.clone(),
        contexts: None,
    }
}

fn build_samples(
    job: &LeasedJob,
    order: &v1::GenerateOrder,
    GeneratedSamples { samples, engine, caveat, tokenizer, canary, .. }: GeneratedSamples,
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
                let alone = self.policies.is_isolating();
                *samples < if alone { 1 } else { self.policies.config().slots }
            };
            let _ = outstanding.wait_for(room).await;
        }
        .boxed()
    }

    fn run<'a>(&'a self, job: &'a LeasedJob) -> BoxFuture<'a, Result<(), JobError>> {
        self.generate_samples(job).boxed()
    }

    fn prefetch_checkpoint<'a>(&'a self, ahead: &'a PrefetchedCheckpoint) -> BoxFuture<'a, ()> {
        self.policies.prefetch_adapter(ahead).map(|_| ()).boxed()
    }

    fn uses_gpu(&self) -> bool {
        self.policies.uses_gpu()
    }

    fn describe_engine(&self) -> String {
        self.policies.describe_engine()
    }

    fn list_abilities(&self) -> Vec<String> {
        self.policies.list_abilities()
    }

    fn current_throughput(&self) -> Option<SamplingThroughput> {
        Some(self.throughput.current_throughput(self.policies.config().slots))
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
