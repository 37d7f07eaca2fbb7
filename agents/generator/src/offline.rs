//! Samples without a fleet, drawn by a worker as an agent runs it.

use std::path::Path;

use agent::{WorkerError, WorkerLauncher, WorkerProcess};
use futures::future::ready;
use wire::{WorkKind, v1};

use crate::{
    GeneratorBackend,
    messages::{
        AdapterSwapRequest, GenerateProgress, GenerateRequest, GeneratorAnswer, GeneratorRequest,
        count_samples,
    },
    worker_command::{PROGRESS_TIMEOUT, PROGRESS_TIMEOUT_MIN, PolicyFiles, worker_command},
};

/// The policy of an offline generator.
#[derive(Debug, Clone)]
pub struct OfflinePolicy<'a> {
    /// A directory or GGUF file.
    pub base: &'a Path,
    /// The digest that identifies the base.
    pub base_key: String,
    pub adapter: Option<&'a Path>,
    /// The digest that identifies the adapter; empty for none.
    pub adapter_key: String,
}

/// The samples to draw.
#[derive(Debug, Clone)]
pub struct OfflineRequest {
    pub sampling: v1::Sampling,
    pub seed: u64,
    /// True if samples must have their log-probability.
    pub logprobs: bool,
    pub requests: Vec<v1::generate_order::Request>,
    /// The text whose log-probabilities are wanted; empty for none.
    pub canary: String,
}

/// The samples of an offline request.
#[derive(Debug, Clone)]
pub struct OfflineSamples {
    pub samples: Vec<v1::samples::Sample>,
    pub engine: String,
    /// The reason why the policy cannot be verified; empty if it was.
    pub caveat: String,
    /// Log-probabilities of the canary's tokens, in nats; empty if none were wanted, or the engine
    /// reports none.
    pub canary: Vec<f32>,
}

/// A worker that draws samples. It ends when this is dropped.
pub struct OfflineGenerator {
    launch: WorkerLauncher,
    worker: WorkerProcess,
}

impl OfflineGenerator {
    /// Starts the worker, which draws a number of samples at once. It loads the policy with the
    /// first request.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn start(
        launch: &WorkerLauncher,
        backend: &GeneratorBackend,
        policy: OfflinePolicy<'_>,
        slots: u32,
    ) -> anyhow::Result<Self> {
        let key = (policy.base_key, policy.adapter_key);
        let files = PolicyFiles { key: &key, base: Some(policy.base), adapter: policy.adapter };
        let worker = WorkerProcess::start(&worker_command(
            launch,
            backend,
            &files,
            (WorkKind::Generate, slots),
        )?)?;
        Ok(Self { launch: launch.clone(), worker })
    }

    /// Draws samples. `progress` receives the samples done and their total.
    ///
    /// # Errors
    /// When the worker refuses the request, hangs or ends.
    pub async fn generate(
        &self,
        request: OfflineRequest,
        mut progress: impl FnMut(u32, u32) + Send,
    ) -> anyhow::Result<OfflineSamples> {
        let total = count_samples(&request.requests).map_err(anyhow::Error::msg)?;
        let OfflineRequest { sampling, seed, logprobs, requests, canary } = request;
        let call = GenerateRequest {
            sampling,
            seed,
            requests,
            logprobs,
            token_logprobs: false,
            canary,
            contexts: None,
        };
        let request = GeneratorRequest::Generate(call);
        match self.call(&request, |samples| progress(samples, total)).await? {
            GeneratorAnswer::Generated(made) => Ok(OfflineSamples {
                samples: made.samples,
                engine: made.engine,
                caveat: made.caveat,
                canary: made.canary,
            }),
            GeneratorAnswer::NotHere(why) => Err(anyhow::Error::msg(why)),
            GeneratorAnswer::Adopted | GeneratorAnswer::Scored(_) => Err(unexpected_answer()),
        }
    }

    /// Draws with another adapter on the same base from now on; `None` for the base alone.
    ///
    /// # Errors
    /// When the engine cannot, or the worker hangs or ends.
    pub async fn swap_adapter(&self, adapter: Option<&Path>) -> anyhow::Result<()> {
        let adapter = adapter.map(Path::to_owned);
        let request = GeneratorRequest::Adopt(AdapterSwapRequest { adapter });
        match self.call(&request, |_| ()).await? {
            GeneratorAnswer::Adopted => Ok(()),
            _ => Err(unexpected_answer()),
        }
    }

    async fn call(
        &self,
        request: &GeneratorRequest,
        mut progress: impl FnMut(u32) + Send,
    ) -> anyhow::Result<GeneratorAnswer> {
        let mut patience = self.launch.silence_timeout(PROGRESS_TIMEOUT, PROGRESS_TIMEOUT_MIN);
        let answer = self.worker.call_with_progress(request, &mut patience, |message| {
            if let Ok(GenerateProgress { samples }) = serde_json::from_value(message) {
                progress(samples);
            }
            ready(())
        });
        match answer.await {
            Ok(answer) => Ok(answer),
            Err(WorkerError::Refused(why)) => Err(anyhow::Error::msg(why)),
            Err(error) => Err(self.worker.add_last_log_line(error).await),
        }
    }
}

fn unexpected_answer() -> anyhow::Error {
    anyhow::Error::msg("unexpected answer from the worker")
}
