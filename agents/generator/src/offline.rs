//! Samples of one request without a fleet, drawn by a worker that serves this request only.

use std::path::Path;

use agent::{WorkerError, WorkerLauncher, WorkerProcess};
use futures::future::ready;
use wire::v1;

use crate::{
    GeneratorBackend,
    messages::{
        GenerateProgress, GenerateRequest, GeneratorAnswer, GeneratorRequest, count_samples,
    },
    role::{self, PROGRESS_TIMEOUT, PROGRESS_TIMEOUT_MIN, PolicyFiles},
};

/// The policy to load and the samples to draw.
#[derive(Debug, Clone)]
pub struct OfflineRequest<'a> {
    /// A directory or GGUF file.
    pub base: &'a Path,
    /// The digest that identifies the base.
    pub base_key: String,
    pub adapter: Option<&'a Path>,
    /// The digest that identifies the adapter; empty for none.
    pub adapter_key: String,
    /// The number of samples drawn at once.
    pub slots: u32,
    pub sampling: v1::Sampling,
    pub seed: u64,
    /// True if samples must have their log-probability.
    pub logprobs: bool,
    pub requests: Vec<v1::generate_order::Request>,
}

/// The samples of an offline request.
#[derive(Debug, Clone)]
pub struct OfflineSamples {
    pub samples: Vec<v1::samples::Sample>,
    pub engine: String,
    /// The reason why the policy cannot be verified; empty if it was.
    pub caveat: String,
}

/// Starts a worker for one request and returns its samples. `progress` receives the samples done
/// and their total.
pub async fn generate_offline(
    launch: &WorkerLauncher,
    backend: &GeneratorBackend,
    once: OfflineRequest<'_>,
    mut progress: impl FnMut(u32, u32) + Send,
) -> anyhow::Result<OfflineSamples> {
    let total = count_samples(&once.requests).map_err(anyhow::Error::msg)?;
    let key = (once.base_key, once.adapter_key);
    let policy = PolicyFiles { key: &key, base: Some(once.base), adapter: once.adapter };
    let worker =
        WorkerProcess::start(&role::worker_command(launch, backend, &policy, once.slots)?)?;
    let OfflineRequest { sampling, seed, logprobs, requests, .. } = once;
    let call = GenerateRequest { sampling, seed, requests, logprobs, canary: String::new() };
    let request = GeneratorRequest::Generate(call);
    let mut patience = launch.silence_timeout(PROGRESS_TIMEOUT, PROGRESS_TIMEOUT_MIN);
    let answer = worker.call_with_progress(&request, &mut patience, |message| {
        if let Ok(GenerateProgress { samples }) = serde_json::from_value(message) {
            progress(samples, total);
        }
        ready(())
    });
    match answer.await {
        Ok(GeneratorAnswer::Generated(made)) => {
            Ok(OfflineSamples { samples: made.samples, engine: made.engine, caveat: made.caveat })
        }
        Ok(GeneratorAnswer::NotHere(why)) => Err(anyhow::Error::msg(why)),
        Ok(GeneratorAnswer::Adopted) => {
            Err(anyhow::Error::msg("unexpected answer from the worker"))
        }
        Err(WorkerError::Refused(why)) => Err(anyhow::Error::msg(why)),
        Err(error) => Err(worker.add_last_log_line(error).await),
    }
}
