//! The agent's side: samples in, verdicts out, one warm worker.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow};
use futures::future::{BoxFuture, FutureExt, ready};
use runtime::{Job, JobError, Launch, Role, Worker, WorkerError};
use tokio::sync::Semaphore;
use wire::{Body, Place, Prompt, WorkKind, v1};

use crate::{
    Kit,
    bench::version,
    calls::{Item, Judged, Verified, Verify},
    tools::{Need, needs},
};

/// A worker that judges nothing for so long is hung: the longest limit of a command, and more.
const SILENCE: Duration = Duration::from_secs(3600 + 60);

/// Jobs held at once: each uses all the cores it may.
const JOBS_MAX: usize = 1;

/// Prompt files kept parsed.
const FILES_MAX: usize = 4;

/// What a worker inherits besides the usual: keys of judges.
const KEY_PREFIX: &str = "FLOTILLA_JUDGE_KEY";

/// Prompts of one file, by id.
type Prompts = Arc<BTreeMap<String, Prompt>>;

/// The verifier role of an agent.
pub struct VerifierRole {
    launch: Launch,
    kit: Kit,
    /// What contains programs here, or why nothing does.
    contained: Result<String, String>,
    room: Semaphore,
    warm: Mutex<Option<Worker>>,
    prompts: Mutex<Vec<(String, Prompts)>>,
}

impl VerifierRole {
    /// Tests what this box has to judge with. Takes up to a second or two.
    pub fn open(launch: Launch, kit: Kit) -> Self {
        let (kit, contained) = kit.tested();
        match &contained {
            Ok(layers) => {
                tracing::info!(tools = kit.tools.describe(), layers, "verifier");
            }
            Err(problem) => tracing::warn!(
                problem,
                "programs cannot be contained here: runs whose verifiers run programs are left to \
                 other boxes"
            ),
        }
        Self {
            launch,
            kit,
            contained,
            room: Semaphore::new(JOBS_MAX),
            warm: Mutex::new(None),
            prompts: Mutex::default(),
        }
    }

    async fn verify(&self, job: &Job) -> Result<(), JobError> {
        let _room = self.room.acquire().await.map_err(JobError::retry)?;
        let Body::Samples(samples) = &job.record.fact.body else {
            return Err(JobError::fatal(anyhow!("not samples (E111)")));
        };
        let name = samples.job.parse().map_err(JobError::fatal)?;
        let place = Place::Verdicts { cycle: samples.cycle, job: name };
        if job.is_written(place.clone()).await? {
            return Ok(());
        }
        let call = self.prepare(job, samples).await?;
        let needs = call.verifier.how.as_ref().map(|how| needs(how, call.items.iter()));
        let needs = needs.unwrap_or_default();
        self.can(job, &needs).await?;
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
        let Verified { verdicts, trouble } = match verified {
            Ok(verified) => verified,
            Err(WorkerError::Refused(problem)) => return Err(JobError::fatal(anyhow!(problem))),
            Err(error) => {
                // It hangs or talks nonsense: a new one may fare better.
                worker.kill();
                return Err(JobError::of_worker(error, &worker).await);
            }
        };
        if let Some(trouble) = trouble {
            let others = able(&job.others().await?, &needs);
            if !job.errors_stand(&others).await? {
                return Err(JobError::retry(anyhow!(
                    "some could not be judged here: {trouble} (E117)"
                )));
            }
        }
        let body = v1::Verdicts {
            run: samples.run.clone(),
            cycle: samples.cycle,
            job: samples.job.clone(),
            purpose: samples.purpose,
            agent: job.agent.clone(),
            verifier: version(&call.verifier),
            samples_sequence: job.record.sequence,
            verdicts,
            wall_s: began.elapsed().as_secs_f64(),
            suite: samples.suite.clone(),
        };
        job.write(place, Body::Verdicts(body)).await
    }

    /// Passes on what this box cannot judge, and says who can.
    async fn can(&self, job: &Job, needs: &BTreeSet<Need>) -> Result<(), JobError> {
        let lacking = self.kit.lacking(needs);
        if lacking.is_empty() {
            return Ok(());
        }
        let contained = lacking.iter().any(|need| need.is_contained());
        let why = match &self.contained {
            Err(problem) if contained => format!("programs cannot be contained here: {problem}"),
            _ => {
                let lacking: Vec<String> = lacking.iter().map(|need| need.lacking()).collect();
                format!("this box lacks {}", lacking.join("; "))
            }
        };
        let able = able(&job.others().await?, needs);
        let whom = match &*able {
            [] => "no verifier that is there has it; the run goes on by itself when one has".into(),
            able => format!("left to {}", able.join(", ")),
        };
        Err(JobError::not_here(anyhow!("{why}; {whom} (E117)")))
    }

    /// Joins the samples with what their prompts say.
    async fn prepare(&self, job: &Job, samples: &v1::Samples) -> Result<Verify, JobError> {
        let Some(v1::spec::Kind::Raft(raft)) = job.spec().await?.kind else {
            return Err(JobError::fatal(anyhow!(
                "the run is not of a kind that is verified (E111)"
            )));
        };
        let set = raft.prompt_set(samples.purpose(), &samples.suite);
        let file = set.and_then(|set| Some((set.file?, set.verifier?)));
        let (file, verifier) = file.ok_or_else(|| {
            JobError::fatal(anyhow!(
                "the spec names no prompts of suite {:?} (E111)",
                samples.suite
            ))
        })?;
        let prompts = self.prompts(job, file).await?;
        let join = |sample: &v1::samples::Sample| {
            let prompt = prompts.get(&sample.prompt_id).with_context(|| {
                format!("the prompts file has no prompt {:?}", sample.prompt_id)
            })?;
            Ok(Item::of(prompt, sample.index, sample.text.clone()))
        };
        let items: anyhow::Result<Vec<Item>> = samples.samples.iter().map(join).collect();
        Ok(Verify { verifier: verifier.clone(), items: items.map_err(JobError::fatal)? })
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
        let tools = serde_json::to_string(&self.kit.tools).map_err(JobError::retry)?;
        let mut arguments =
            vec!["--threads".into(), threads.into(), "--tools".into(), tools.into()];
        for hidden in &self.kit.hidden {
            arguments.extend(["--hidden".into(), hidden.into()]);
        }
        let mut command = self.launch.worker("verify", "verify", arguments);
        let keys = std::env::vars_os()
            .filter_map(|(name, key)| Some((name.into_string().ok()?, key.into_string().ok()?)));
        command.environment.extend(keys.filter(|(name, _)| name.starts_with(KEY_PREFIX)));
        let worker = Worker::start(&command)?;
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

/// Those that have what is needed, as far as they say. What only its own box knows of, each may.
fn able(others: &[v1::AgentStatus], needs: &BTreeSet<Need>) -> Vec<String> {
    let has = |status: &v1::AgentStatus, need: &Need| {
        let tag = format!("verifier:{}", need.tag());
        !need.is_contained() || status.abilities.contains(&tag)
    };
    let able = |status: &&v1::AgentStatus| needs.iter().all(|need| has(status, need));
    others.iter().filter(able).map(|status| status.agent.clone()).collect()
}

impl Role for VerifierRole {
    fn kind(&self) -> WorkKind {
        WorkKind::Verify
    }

    fn room(&self) -> BoxFuture<'_, ()> {
        // The permit is taken again by the job itself.
        async { drop(self.room.acquire().await) }.boxed()
    }

    fn engine(&self) -> String {
        match &self.contained {
            Ok(_) => self.kit.tools.describe(),
            Err(_) => "no programs: they cannot be contained here; the agent's log says why".into(),
        }
    }

    fn abilities(&self) -> Vec<String> {
        self.kit.tools.0.keys().cloned().collect()
    }

    fn run<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<(), JobError>> {
        self.verify(job).boxed()
    }
}
