//! The agent's side of the scorer role: reads samples, calls one warm worker, writes scores.

use std::time::Instant;

use agent::{AgentRole, JobError, LeasedJob, PromptFiles, PromptIndex};
use anyhow::{Context, anyhow};
use futures::future::{BoxFuture, FutureExt};
use generator::{
    GeneratorAnswer, GeneratorConfig, GeneratorRequest, PolicyWorker, SampleToScore, ScoreRequest,
};
use tokio::sync::Semaphore;
use wire::{FactBody, FactKey, WorkKind, encode_logprobs, v1};

/// A job has enough samples to fill the worker.
const JOBS_MAX: usize = 1;

/// The scorer role of an agent. It holds one job at a time and keeps a worker with the teacher of
/// the last run.
pub struct ScorerRole {
    teachers: PolicyWorker,
    job_permits: Semaphore,
    prompt_files: PromptFiles,
}

impl ScorerRole {
    /// Creates the role without a worker; the first job starts it.
    pub fn new(config: GeneratorConfig) -> Self {
        Self {
            teachers: PolicyWorker::new(config, WorkKind::Score),
            job_permits: Semaphore::new(JOBS_MAX),
            prompt_files: PromptFiles::default(),
        }
    }

    /// Scores training samples of a run that has a teacher. Others need no scores.
    async fn score_samples(&self, job: &LeasedJob) -> Result<(), JobError> {
        let _room = self.job_permits.acquire().await.map_err(JobError::retryable_failure)?;
        let FactBody::Samples(samples) = &job.record.fact.body else {
            return Err(JobError::fatal_failure(anyhow!("not samples (E111)")));
        };
        if samples.purpose() == v1::Purpose::Heldout {
            return Ok(());
        }
        let Some(v1::spec::Kind::Raft(raft)) = job.read_spec().await?.kind else { return Ok(()) };
        let Some(teacher) = &raft.teacher else { return Ok(()) };
        let FactKey::Samples { cycle, job: name } = job.record.fact.subject.key.clone() else {
            return Err(JobError::fatal_failure(anyhow!("not samples (E111)")));
        };
        let place = FactKey::Scores { cycle, job: name.clone() };
        if job.is_written(place.clone()).await? {
            return Ok(());
        }
        let backend = &self.teachers.config().backend;
        if !backend.has_verified_weights() {
            return Err(JobError::host_unfit(anyhow!(
                "{} cannot score: it reports no log-probabilities of given tokens; use another \
                 engine (A102)",
                backend.describe_engine()
            )));
        }
        let file = raft
            .prompts
            .as_ref()
            .ok_or_else(|| JobError::fatal_failure(anyhow!("the spec names no prompts (E111)")))?;
        let prompts = self.prompt_files.load_prompts(job, file).await?;
        let request = build_request(samples, &prompts, raft.end_token);
        let request = request.map_err(JobError::fatal_failure)?;
        let loaded = self.teachers.ensure_loaded(job, teacher, None).await?;
        let began = Instant::now();
        let total = u32::try_from(samples.samples.len()).unwrap_or(u32::MAX);
        let on_progress = |done| job.progress.set_progress(done, total, "samples");
        let request = GeneratorRequest::Score(request);
        let answer = self.teachers.call(&loaded, &request, on_progress).await?;
        let GeneratorAnswer::Scored(scored) = answer else {
            return Err(JobError::retryable_failure(anyhow!(
                "unexpected answer from the worker (E107)"
            )));
        };
        self.teachers.record_answered_job();
        let scores = scored
            .logprobs
            .iter()
            .map(|logprobs| v1::scores::Score { token_logprobs: encode_logprobs(logprobs) });
        let body = v1::Scores {
            run: samples.run.clone(),
            cycle,
            job: name.to_string(),
            agent: job.agent.clone(),
            engine: scored.engine,
            teacher: teacher.manifest.clone(),
            samples_sequence: job.record.sequence,
            scores: scores.collect(),
            wall_s: began.elapsed().as_secs_f64(),
        };
        job.write_result(place, FactBody::Scores(body)).await
    }
}

/// Joins the samples with their prompts.
fn build_request(
    samples: &v1::Samples,
    prompts: &PromptIndex,
    end_token: u32,
) -> anyhow::Result<ScoreRequest> {
    let to_score = |sample: &v1::samples::Sample| {
        let id = &sample.prompt_id;
        let prompt = prompts.get(id);
        let prompt = prompt.with_context(|| format!("the prompts file has no prompt {id:?}"))?;
        Ok(SampleToScore {
            prompt: prompt.prompt.clone(),
            text: sample.text.clone(),
            is_finished: sample.finish() == v1::samples::Finish::Stop,
            token_ids: sample.token_ids.clone(),
        })
    };
    let samples: anyhow::Result<_> = samples.samples.iter().map(to_score).collect();
    Ok(ScoreRequest { samples: samples?, end_token })
}

impl AgentRole for ScorerRole {
    fn work_kind(&self) -> WorkKind {
        WorkKind::Score
    }

    fn wait_for_room(&self) -> BoxFuture<'_, ()> {
        // The job takes its own permit when it starts.
        async { drop(self.job_permits.acquire().await) }.boxed()
    }

    fn uses_gpu(&self) -> bool {
        self.teachers.uses_gpu()
    }

    fn describe_engine(&self) -> String {
        self.teachers.describe_engine()
    }

    fn list_abilities(&self) -> Vec<String> {
        self.teachers.list_abilities()
    }

    fn run<'a>(&'a self, job: &'a LeasedJob) -> BoxFuture<'a, Result<(), JobError>> {
        self.score_samples(job).boxed()
    }
}
