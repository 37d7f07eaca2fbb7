//! Samples of one order without a fleet: the same worker, asked once.

use std::path::Path;

use futures::future::ready;
use runtime::{Launch, Worker, WorkerError};
use wire::v1;

use crate::{
    Backend,
    calls::{Answer, Done, Generate, Request, samples_of},
    role::{self, Policy, SILENCE, SILENCE_MIN},
};

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Once<'a> {
    pub base: &'a Path,
    /// What the base is known by: a digest.
    pub base_key: String,
    pub adapter: Option<&'a Path>,
    /// What the adapter is known by.
    pub adapter_key: String,
    pub slots: u32,
    pub sampling: v1::Sampling,
    pub seed: u64,
    /// Whether samples say how likely they were.
    pub logprobs: bool,
    pub requests: Vec<v1::generate_order::Request>,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Made {
    pub samples: Vec<v1::samples::Sample>,
    pub engine: String,
    /// Why nobody can say that it was the policy asked for; empty when it was.
    pub caveat: String,
}

/// Starts a worker for this alone. `progress` hears samples done, and of how many.
///
/// # Errors
/// When the worker cannot be started, refuses, dies or hangs.
pub async fn generate_once(
    launch: &Launch,
    backend: &Backend,
    once: Once<'_>,
    mut progress: impl FnMut(u32, u32) + Send,
) -> anyhow::Result<Made> {
    let total = samples_of(&once.requests).map_err(anyhow::Error::msg)?;
    let key = (once.base_key, once.adapter_key);
    let policy = Policy { key: &key, base: Some(once.base), adapter: once.adapter };
    let worker = Worker::start(&role::command(launch, backend, &policy, once.slots)?)?;
    let Once { sampling, seed, logprobs, requests, .. } = once;
    let call = Generate { sampling, seed, requests, logprobs, canary: String::new() };
    let request = Request::Generate(call);
    let mut patience = launch.patience(SILENCE, SILENCE_MIN);
    let answer = worker.call(&request, &mut patience, |said| {
        if let Ok(Done { samples }) = serde_json::from_value(said) {
            progress(samples, total);
        }
        ready(())
    });
    match answer.await {
        Ok(Answer::Generated(made)) => {
            Ok(Made { samples: made.samples, engine: made.engine, caveat: made.caveat })
        }
        Ok(Answer::NotHere(why)) => Err(anyhow::Error::msg(why)),
        Ok(Answer::Adopted) => Err(anyhow::Error::msg("the worker answered something else")),
        Err(WorkerError::Refused(why)) => Err(anyhow::Error::msg(why)),
        Err(error) => Err(worker.last_words(error).await),
    }
}
