//! The agent's side: samples in, verdicts out, one warm worker.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow};
use futures::future::{BoxFuture, FutureExt, ready};
use runtime::{Job, JobError, Launch, Role, Worker};
use tokio::sync::Semaphore;
use wire::{Body, Place, Prompt, WorkKind, v1};

use crate::calls::{Item, Judged, Verified, Verify};

/// A worker that judges nothing for so long is hung: the longest limit of a command, and more.
const SILENCE: Duration = Duration::from_secs(3600 + 60);

/// Jobs held at once: each uses all the cores it may.
const JOBS_MAX: usize = 1;

/// Prompt files kept parsed.
const FILES_MAX: usize = 4;

/// Prompts of one file, by id.
type Prompts = Arc<BTreeMap<String, Prompt>>;

/// The verifier role of an agent.
pub struct VerifierRole {
    launch: Launch,
    room: Semaphore,
    warm: Mutex<Option<Worker>>,
    prompts: Mutex<Vec<(String, Prompts)>>,
}

impl VerifierRole {
    pub fn new(launch: Launch) -> Self {
        Self {
            launch,
            room: Semaphore::new(JOBS_MAX),
            warm: Mutex::new(None),
            prompts: Mutex::default(),
        }
    }

    async fn verify(&self, job: &Job) -> Result<(), JobError> {
        let _room = self.room.acquire().await.map_err(JobError::retry)?;
        let Body::Samples(samples) = &job.record.fact.body else {
            return Err(JobError::fatal(anyhow!("not samples")));
        };
        let name = samples.job.parse().map_err(JobError::fatal)?;
        let place = Place::Verdicts { cycle: samples.cycle, job: name };
        if job.is_written(place.clone()).await? {
            return Ok(());
        }
        let call = self.prepare(job, samples).await?;
        let worker = self.worker()?;
        let began = Instant::now();
        let total = u32::try_from(call.items.len()).unwrap_or(u32::MAX);
        let mut dropped = KillUnanswered { worker: &worker, answered: false };
        let verified: Result<Verified, _> = worker
            .call(&call, &mut self.launch.patience(SILENCE, SILENCE), |progress| {
                if let Ok(Judged { items }) = serde_json::from_value(progress) {
                    job.progress.set(items, total, "verdicts");
                }
                ready(())
            })
            .await;
        dropped.answered = true;
        let verdicts = match verified {
            Ok(verified) => verified.verdicts,
            Err(error) => {
                // It hangs or talks nonsense: a new one may fare better.
                worker.kill();
                return Err(JobError::of_worker(error, &worker).await);
            }
        };
        let body = v1::Verdicts {
            run: samples.run.clone(),
            cycle: samples.cycle,
            job: samples.job.clone(),
            purpose: samples.purpose,
            agent: job.agent.clone(),
            verifier: format!("{}/{}", name_of(&call.verifier), env!("CARGO_PKG_VERSION")),
            samples_sequence: job.record.sequence,
            verdicts,
            wall_s: began.elapsed().as_secs_f64(),
        };
        job.write(place, Body::Verdicts(body)).await
    }

    /// Joins the samples with what their prompts say.
    async fn prepare(&self, job: &Job, samples: &v1::Samples) -> Result<Verify, JobError> {
        let Some(v1::spec::Kind::Raft(raft)) = job.spec().await?.kind else {
            return Err(JobError::fatal(anyhow!("the run is not of a kind that is verified")));
        };
        let file = match samples.purpose() {
            v1::Purpose::Heldout => raft.heldout,
            v1::Purpose::Train | v1::Purpose::Unspecified => raft.prompts,
        };
        let file = file.ok_or_else(|| JobError::fatal(anyhow!("the spec names no prompts")))?;
        let prompts = self.prompts(job, &file).await?;
        let join = |sample: &v1::samples::Sample| {
            let prompt = prompts.get(&sample.prompt_id).with_context(|| {
                format!("the prompts file has no prompt {:?}", sample.prompt_id)
            })?;
            Ok(Item {
                prompt_id: sample.prompt_id.clone(),
                index: sample.index,
                prompt: prompt.prompt.clone(),
                completion: sample.text.clone(),
                answer: prompt.answer.clone(),
                fields: prompt.fields.clone(),
            })
        };
        let items: anyhow::Result<Vec<Item>> = samples.samples.iter().map(join).collect();
        Ok(Verify {
            verifier: raft.verifier.unwrap_or_default(),
            items: items.map_err(JobError::fatal)?,
        })
    }

    async fn prompts(&self, job: &Job, file: &v1::Blob) -> Result<Prompts, JobError> {
        let known = |files: &Vec<(String, Prompts)>| {
            let found = files.iter().find(|(digest, _)| *digest == file.digest);
            found.map(|(_, prompts)| prompts.clone())
        };
        if let Some(prompts) = self.prompts.lock().ok().and_then(|files| known(&files)) {
            return Ok(prompts);
        }
        let cached = job.cache.blob(&job.store, file).await?;
        let text = tokio::fs::read(cached.path())
            .await
            .with_context(|| format!("read {}", cached.path().display()))
            .map_err(JobError::retry)?;
        // A large file takes seconds, and leases are kept on this thread.
        let parsed = tokio::task::spawn_blocking(move || Prompt::parse_all(&text)).await;
        let prompts = parsed.map_err(JobError::retry)?.map_err(JobError::fatal)?;
        let prompts: Prompts =
            Arc::new(prompts.into_iter().map(|prompt| (prompt.id.clone(), prompt)).collect());
        if let Ok(mut files) = self.prompts.lock() {
            files.truncate(FILES_MAX - 1);
            files.insert(0, (file.digest.clone(), prompts.clone()));
        }
        Ok(prompts)
    }

    fn worker(&self) -> Result<Worker, JobError> {
        let mut warm = self.warm.lock().map_err(|_| JobError::Stopped)?;
        if let Some(worker) = warm.as_ref().filter(|worker| worker.is_alive()) {
            return Ok(worker.clone());
        }
        let threads = self.launch.threads.to_string();
        let arguments = ["--threads".into(), threads.into()];
        let worker = Worker::start(&self.launch.worker("verify", "verify", arguments))?;
        *warm = Some(worker.clone());
        Ok(worker)
    }
}

/// A call given up (its run was cancelled) would keep the worker busy for nobody.
struct KillUnanswered<'a> {
    worker: &'a Worker,
    answered: bool,
}

impl Drop for KillUnanswered<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.worker.kill();
        }
    }
}

fn name_of(verifier: &v1::Verifier) -> &'static str {
    use v1::verifier::How;
    match verifier.how {
        Some(How::Exact(_)) => "exact",
        Some(How::Numeric(_)) => "numeric",
        Some(How::Regex(_)) => "regex",
        Some(How::Command(_)) => "command",
        None => "none",
    }
}

impl Role for VerifierRole {
    fn kind(&self) -> WorkKind {
        WorkKind::Verify
    }

    fn room(&self) -> BoxFuture<'_, ()> {
        // The permit is taken again by the job itself.
        async { drop(self.room.acquire().await) }.boxed()
    }

    fn run<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<(), JobError>> {
        self.verify(job).boxed()
    }
}
