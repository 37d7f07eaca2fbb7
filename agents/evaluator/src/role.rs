//! The agent's side: fetches the files, starts a new worker process for each suite, and writes the
//! results.

use std::path::Path;

use agent::{AgentRole, JobError, LeasedJob, WorkerLauncher};
use anyhow::anyhow;
use futures::future::{BoxFuture, FutureExt};
use tokio::sync::Semaphore;
use wire::{FactBody, FactKey, SuiteName, WorkKind, v1};

use crate::{
    backend::EvaluatorBackend,
    eval_history,
    messages::{MeasureProgress, MeasureRequest, MeasureResult, TextFormat},
    worker_call::call_worker,
};

/// The evaluator role of an agent. It runs one measurement at a time.
pub struct EvaluatorRole {
    launch: WorkerLauncher,
    backend: EvaluatorBackend,
    measurement_permit: Semaphore,
}

impl EvaluatorRole {
    /// Creates the role with one engine.
    pub fn new(launch: WorkerLauncher, backend: EvaluatorBackend) -> Self {
        Self { launch, backend, measurement_permit: Semaphore::new(1) }
    }

    /// Returns the first error after all suites were tried.
    async fn evaluate_checkpoint(&self, job: &LeasedJob) -> Result<(), JobError> {
        let _busy = self.measurement_permit.acquire().await.map_err(JobError::retryable_failure)?;
        let FactBody::Checkpoint(checkpoint) = &job.record.fact.body else {
            return Err(JobError::fatal_failure(anyhow!("not a checkpoint (E111)")));
        };
        let spec = job.read_spec().await?;
        let mut outcome = Ok(());
        for suite in &spec.suites {
            // An error of one suite does not keep the others from being measured.
            outcome = outcome.and(self.evaluate_suite(job, checkpoint, suite).await);
        }
        outcome
    }

    /// Measures one suite and writes its result, unless the log contains the result already.
    async fn evaluate_suite(
        &self,
        job: &LeasedJob,
        checkpoint: &v1::Checkpoint,
        suite: &v1::Suite,
    ) -> Result<(), JobError> {
        let v1::Checkpoint { cycle, step, .. } = *checkpoint;
        let name = SuiteName::new(suite.name.as_str()).map_err(JobError::fatal_failure)?;
        let place = FactKey::Eval { cycle, step, suite: name };
        if job.is_written(place.clone()).await? {
            return Ok(());
        }
        let (measured, shootdowns) = self.measure_suite(job, checkpoint, suite).await?;
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
        job.write_result(place, FactBody::Eval(eval.clone())).await?;
        if let Err(error) = eval_history::append_eval(&job.directory, &eval) {
            tracing::warn!(%error, "writing to eval_history.jsonl failed");
        }
        Ok(())
    }

    async fn measure_suite(
        &self,
        job: &LeasedJob,
        checkpoint: &v1::Checkpoint,
        suite: &v1::Suite,
    ) -> Result<(MeasureResult, Option<v1::eval::Shootdowns>), JobError> {
        let missing =
            |what: &str| JobError::fatal_failure(anyhow!("the checkpoint names no {what} (E111)"));
        let tree = checkpoint.tree.as_ref().ok_or_else(|| missing("tree"))?;
        let text = suite.text.as_ref().ok_or_else(|| missing("text"))?;
        let tree = job.cache.fetch_tree(&job.store, tree).await?;
        let base = match (&checkpoint.base, checkpoint.content()) {
            (Some(base), v1::checkpoint::Content::Adapter) => {
                Some(job.cache.fetch_tree(&job.store, base).await?)
            }
            _ => None,
        };
        let text = job.cache.fetch_blob(&job.store, text).await?;
        let (model, adapter, named): (&Path, Option<&Path>, _) = match &base {
            Some(base) => (base.path(), Some(tree.path()), &checkpoint.base),
            None => (tree.path(), None, &checkpoint.tree),
        };
        let call = MeasureRequest {
            base: model.to_owned(),
            base_key: named.as_ref().map_or(String::new(), |tree| tree.manifest.clone()),
            adapter: adapter.map(Path::to_owned),
            text: text.path().to_owned(),
            format: match suite.format() {
                v1::suite::Format::Documents => TextFormat::Documents,
                v1::suite::Format::Text | v1::suite::Format::Unspecified => TextFormat::Text,
            },
            n_ctx: suite.n_ctx,
            stride: suite.stride,
            chunks: suite.chunks,
            llama_cpp: match &self.backend {
                EvaluatorBackend::Candle => None,
                EvaluatorBackend::LlamaCpp(llama) => Some((**llama).clone()),
            },
        };
        check_engine(&self.backend, model).await?;
        let span = job.start_shootdown_span();
        let show = |MeasureProgress { chunks, total, note }| {
            let name = &suite.name;
            let note = if note.is_empty() { name.clone() } else { format!("{name}: {note}") };
            job.progress.set_progress(chunks, total, note);
        };
        let measured = call_worker(&self.launch, &call, show).await?;
        Ok((measured, span.finish_span()))
    }
}

/// Fails if only another engine computes the model, which another host may have.
async fn check_engine(backend: &EvaluatorBackend, base: &Path) -> Result<(), JobError> {
    let (base, backend) = (base.to_owned(), backend.clone());
    let check = move || -> anyhow::Result<()> {
        match backend {
            EvaluatorBackend::Candle => Ok(engine::check_architecture(&base)?),
            EvaluatorBackend::LlamaCpp(llama) => {
                Ok(llama::require_converters(&base, llama.converters.as_ref())?)
            }
        }
    };
    let checked = tokio::task::spawn_blocking(check).await.map_err(JobError::retryable_failure)?;
    checked.map_err(JobError::host_unfit)
}

impl AgentRole for EvaluatorRole {
    fn work_kind(&self) -> WorkKind {
        WorkKind::Eval
    }

    fn wait_for_room(&self) -> BoxFuture<'_, ()> {
        // The permit is released at once; the job acquires it again.
        async { drop(self.measurement_permit.acquire().await) }.boxed()
    }

    fn uses_gpu(&self) -> bool {
        matches!(self.backend, EvaluatorBackend::LlamaCpp(_)) && !self.launch.profile.is_cpu()
    }

    fn describe_engine(&self) -> String {
        self.backend.describe_engine()
    }

    fn list_abilities(&self) -> Vec<String> {
        let any = self.backend.takes_any_model();
        any.then(|| wire::ANY_MODEL_ABILITY.to_owned()).into_iter().collect()
    }

    fn run<'a>(&'a self, job: &'a LeasedJob) -> BoxFuture<'a, Result<(), JobError>> {
        self.evaluate_checkpoint(job).boxed()
    }
}
