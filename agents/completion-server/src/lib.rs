//! Answers OpenAI's HTTP API with the embedded engine, in a process of its own: the part of
//! llama-server's API that serving a channel needs, so that either can be asked in the same way.
//!
//! - `request` reads requests. Pure.
//! - `batch` draws the tokens of all requests together, on a thread of its own.
//! - `choice_text` finds whole characters and stop texts in them. Pure.
//! - `answer` writes answers as JSON. Pure.
//! - `token_lists` writes log-probabilities in OpenAI's form, also of llama-server's answers. Pure.
//! - `api` turns a request into work for the batch, and its events into an answer.
//! - `http` listens.
//!
//! Knows neither channels nor the bus.

mod answer;
mod api;
mod batch;
mod choice_text;
mod http;
mod request;
mod serve;
mod token_lists;

/// The parser of requests, for tests with hostile input.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::request::fuzz_body as read_body;
}

pub use http::ListenAddress;
pub use serve::{CompletionServerConfig, run_completion_server};
pub use token_lists::add_token_lists;
