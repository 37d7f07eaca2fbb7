//! Answers requests to the models of channels, with a child process for each base: `llama-server`, or
//! the embedded engine.
//!
//! - `placement` decides which channels this agent serves. Pure.
//! - `channel_server` follows channels and agents, loads models and hands out requests.
//! - `serving_engine` chooses the engine.
//! - `model_process` runs one process with a base and its adapters.
//! - `hang_watch` notices that a process hangs.
//! - `forwarding` passes a request to it, and the answer back to the gateway.
//! - `logprobs_rewriter` gives log-probabilities of llama-server OpenAI's form. Pure.
//!
//! A moved channel is loaded beside the old model, which ends after its last answer.

mod channel_server;
mod forwarding;
mod hang_watch;
mod logprobs_rewriter;
mod model_process;
mod placement;
mod serving_engine;

pub use channel_server::{ModelServerConfig, serve_channels};
pub use serving_engine::{EmbeddedServer, ServingEngine, ServingEngineChoice};
