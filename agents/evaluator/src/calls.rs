//! What the agent asks of its measuring process, and what it answers.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use wire::v1;

use crate::llama_cpp::LlamaCpp;

/// Measure the perplexity of a text.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measure {
    pub base: PathBuf,
    /// What the base is known by: a digest.
    pub base_key: String,
    pub adapter: Option<PathBuf>,
    pub text: PathBuf,
    pub format: Format,
    pub n_ctx: u32,
    pub stride: u32,
    pub chunks: u32,
    /// Where it can; without it, or where it cannot, candle measures.
    #[serde(default)]
    pub llama_cpp: Option<LlamaCpp>,
}

/// How a text file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    Text,
    Documents,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Done {
    pub chunks: u32,
    pub total: u32,
    /// What is being done, if it is no chunk.
    #[serde(default)]
    pub note: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Measured(Box<Measured>),
    Failed { blame: Blame, message: String },
}

/// What is at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Blame {
    /// Text, model or adapter: no try will succeed.
    Content,
    /// This box: others can do the work.
    Box,
    /// Nobody knows; another try may succeed.
    Work,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub mean_nll: f64,
    pub perplexity: f64,
    pub stderr: f64,
    pub bits_per_byte: f64,
    pub tokens: u64,
    pub chunks: u32,
    pub engine: String,
    pub protocol: String,
    pub tokenizer: String,
    pub canary: f64,
    pub process: v1::eval::Process,
}

/// Reads a value as each message in turn, for tests with hostile input.
#[doc(hidden)]
pub fn fuzz(value: &serde_json::Value) {
    // Whether it is one is of no interest.
    let _ = Measure::deserialize(value);
    let _ = Done::deserialize(value);
    let _ = Answer::deserialize(value);
}
