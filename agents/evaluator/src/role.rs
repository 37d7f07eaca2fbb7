//! The agent's side: fetch, start a fresh process a suite, write the figures.

use std::{ffi::OsString, path::Path, time::Duration};

use anyhow::anyhow;
use futures::future::{BoxFuture, FutureExt, ready};
use runtime::{Fault, Job, JobError, Launch, Role, Worker};
use tokio::sync::Semaphore;
use wire::{Body, Place, SuiteName, WorkKind, v1};

use crate::{
    backend::{Backend, SILENCE},
    calls::{Answer, Blame, Done, Format, Measure, Measured},
    history,
};

/// However quick its chunks were before, it may take so long.
const SILENCE_MIN: Duration = Duration::from_secs(60);

/// The evaluator role of an agent.
pub struct EvaluatorRole {
    launch: Launch,
    backend: Backend,
    /// One measurement at a time.
    busy: Semaphore,
}

impl EvaluatorRole {
    pub fn new(launch: Launch, backend: Backend) -> Self {
        Self { launch, backend, busy: Semaphore::new(1) }
    }

    async fn evaluate(&self, job: &Job) -> Result<(), JobError> {
        let _busy = self.busy.acquire().await.map_err(JobError::retry)?;
        let Body::Checkpoint(checkpoint) = &job.record.fact.body else {
            return Err(JobError::fatal(anyhow!("not a checkpoint (E111)")));
        };
        let spec = job.spec().await?;
        let mut outcome = Ok(());
        for suite in &spec.suites {
            // One suite's trouble is not another's.
            outcome = outcome.and(self.suite(job, checkpoint, suite).await);
        }
        outcome
    }

    async fn suite(
        &self,
        job: &Job,
        checkpoint: &v1::Checkpoint,
        suite: &v1::Suite,
    ) -> Result<(), JobError> {
        let v1::Checkpoint { cycle, step, .. } = *checkpoint;
        let name = SuiteName::new(suite.name.as_str()).map_err(JobError::fatal)?;
        let place = Place::Eval { cycle, step, suite: name };
        if job.is_written(place.clone()).await? {
            return Ok(());
        }
        let (measured, shootdowns) = self.measure(job, checkpoint, suite).await?;
        let eval = v1::Eval {
            run: job.run.to_string(),
            cycle,
            step,
            suite: suite.name.clone(),
            manifest: checkpoint.tree.as_ref().map_or(String::new(), |tree| tree.manifest.clone()),
            mean_nll: measured.mean_nll,
            perplexity: measured.perplexity,
            stderr: measured.stderr,
            bits_per_byte: measured.bits_per_byte,
            tokens: measured.tokens,
            chunks: measured.chunks,
            engine: measured.engine,
            agent: job.agent.clone(),
            process: Some(measured.process),
            protocol: measured.protocol,
            n_ctx: suite.n_ctx,
            stride: suite.stride,
            tokenizer: measured.tokenizer,
            text: suite.text.as_ref().map_or(String::new(), |text| text.digest.clone()),
            canary: measured.canary,
            shootdowns,
        };
        job.write(place, Body::Eval(eval.clone())).await?;
        if let Err(error) = history::append(&job.directory, &eval) {
            tracing::warn!(%error, "adding to eval_history.jsonl");
        }
        Ok(())
    }

    async fn measure(
        &self,
        job: &Job,
        checkpoint: &v1::Checkpoint,
        suite: &v1::Suite,
    ) -> Result<(Measured, Option<v1::eval::Shootdowns>), JobError> {
        let missing =
            |what: &str| JobError::fatal(anyhow!("the checkpoint names no {what} (E111)"));
        let tree = checkpoint.tree.as_ref().ok_or_else(|| missing("tree"))?;
        let text = suite.text.as_ref().ok_or_else(|| missing("text"))?;
        let tree = job.cache.tree(&job.store, tree).await?;
        let base = match (&checkpoint.base, checkpoint.content()) {
            (Some(base), v1::checkpoint::Content::Adapter) => {
                Some(job.cache.tree(&job.store, base).await?)
            }
            _ => None,
        };
        let text = job.cache.blob(&job.store, text).await?;
        let (model, adapter): (&Path, Option<&Path>) = match &base {
            Some(base) => (base.path(), Some(tree.path())),
            None => (tree.path(), None),
        };
        let named =
            if base.is_some() { checkpoint.base.as_ref() } else { checkpoint.tree.as_ref() };
        let call = Measure {
            base: model.to_owned(),
            base_key: named.map_or(String::new(), |tree| tree.manifest.clone()),
            adapter: adapter.map(Path::to_owned),
            text: text.path().to_owned(),
            format: match suite.format() {
                v1::suite::Format::Documents => Format::Documents,
                v1::suite::Format::Text | v1::suite::Format::Unspecified => Format::Text,
            },
            n_ctx: suite.n_ctx,
            stride: suite.stride,
            chunks: suite.chunks,
            llama_cpp: match &self.backend {
                Backend::Candle => None,
                Backend::LlamaCpp(llama) => Some((**llama).clone()),
            },
        };
        let command = self.launch.worker("eval", "eval", Vec::<OsString>::new());
        let span = job.span();
        let worker = Worker::start(&command)?;
        let measured = worker
            .call(&call, &mut self.launch.patience(SILENCE, SILENCE_MIN), |progress| {
                if let Ok(Done { chunks, total, note }) = serde_json::from_value(progress) {
                    let name = &suite.name;
                    let note =
                        if note.is_empty() { name.clone() } else { format!("{name}: {note}") };
                    job.progress.set(chunks, total, note);
                }
                ready(())
            })
            .await;
        match measured {
            Ok(Answer::Measured(measured)) => Ok((*measured, span.finish())),
            Ok(Answer::Failed { blame, message }) => {
                let fault = match blame {
                    Blame::Content => Fault::Content,
                    Blame::Box => Fault::Box,
                    Blame::Work => Fault::Work,
                };
                let failed = JobError::said_by_worker(fault, message, &worker).await;
                Err(failed.explained(&worker.kernel_log().await))
            }
            Err(error) => Err(JobError::of_model_worker(error, &worker).await),
        }
    }
}

impl Role for EvaluatorRole {
    fn kind(&self) -> WorkKind {
        WorkKind::Eval
    }

    fn room(&self) -> BoxFuture<'_, ()> {
        // The permit is taken again by the job itself.
        async { drop(self.busy.acquire().await) }.boxed()
    }

    fn uses_gpu(&self) -> bool {
        matches!(self.backend, Backend::LlamaCpp(_)) && !self.launch.profile.is_cpu()
    }

    fn engine(&self) -> String {
        self.backend.describe()
    }

    fn run<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<(), JobError>> {
        self.evaluate(job).boxed()
    }
}
