//! The worker's side: one policy at a time, samples of all calls at hand drawn together.

mod canary;
mod candle;
mod endpoint;
mod http;
mod llama_cpp;
mod open;
mod served;

use std::path::PathBuf;

use engine::Dtype;
use runtime::Inbox;

use crate::{Backend, calls::Request};

/// What the agent starts the worker with.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    pub backend: Backend,
    /// Empty for an endpoint, which has it.
    pub base: PathBuf,
    /// What the base is known by: a digest.
    pub base_key: String,
    pub adapter: Option<PathBuf>,
    /// What the adapter is known by.
    pub adapter_key: String,
    pub slots: usize,
    /// Candle's.
    pub device: String,
    pub dtype: Dtype,
}

/// Serves calls until the agent closes the pipe.
///
/// # Errors
/// When what draws the samples is gone and several calls go with it: one of them may be why.
pub fn work(config: &WorkerConfig) -> anyhow::Result<()> {
    let inbox: Inbox<Request> = Inbox::open();
    match &config.backend {
        Backend::Candle => {
            candle::serve(config, &inbox);
            Ok(())
        }
        Backend::LlamaCpp(llama) => served::serve(config, inbox, |slots| {
            Ok(served::Source::LlamaCpp(Box::new(llama_cpp::Source::new(llama, config, slots)?)))
        }),
        Backend::Endpoint(endpoint) => served::serve(config, inbox, |_| {
            Ok(served::Source::Endpoint(endpoint::Source::new(endpoint, config)?))
        }),
    }
}
