//! The worker's side: one policy at a time; the samples of all pending calls are drawn together.

mod canary_cache;
mod candle;
mod endpoint;
mod http_backend;
mod llama_server;
mod pending_calls;
mod sample_task;
mod slot_planner;
mod token_record;
mod turn_prompt;

use std::path::PathBuf;

use agent::CallInbox;
use engine::MatrixDtype;

use crate::{GeneratorBackend, messages::GeneratorRequest};

/// The command-line settings with which the agent starts the worker.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    pub backend: GeneratorBackend,
    /// A directory or GGUF file; empty for an external server, which has it.
    pub base: PathBuf,
    /// The digest that identifies the base.
    pub base_key: String,
    pub adapter: Option<PathBuf>,
    /// The digest that identifies the adapter; empty for none.
    pub adapter_key: String,
    /// The number of sequences drawn at once.
    pub slots: usize,
    /// The device of the embedded engine.
    pub device: String,
    /// The weight type of the embedded engine.
    pub dtype: MatrixDtype,
}

/// Serves calls until the agent closes the pipe.
///
/// # Errors
/// When the server that draws the samples ends while several calls are pending: any of them may be
/// the cause.
pub fn run_generate_worker(config: &WorkerConfig) -> anyhow::Result<()> {
    let inbox: CallInbox<GeneratorRequest> = CallInbox::read_stdin();
    match &config.backend {
        GeneratorBackend::Candle => {
            candle::serve_calls(config, &inbox);
            Ok(())
        }
        GeneratorBackend::LlamaCpp(llama) => http_backend::serve_calls(config, inbox, |slots| {
            Ok(http_backend::HttpBackend::LlamaCpp(Box::new(
                llama_server::LlamaServerBackend::new(llama, config, slots)?,
            )))
        }),
        GeneratorBackend::Endpoint(endpoint) => http_backend::serve_calls(config, inbox, |_| {
            Ok(http_backend::HttpBackend::Endpoint(endpoint::EndpointBackend::new(
                endpoint, config,
            )?))
        }),
    }
}
