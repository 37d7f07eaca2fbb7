//! The messages between the agent and its measuring process.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use wire::v1;

use crate::llama_cpp::LlamaCppEvaluator;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct MeasureRequest {
    pub base: PathBuf,
    /// The digest that identifies the base.
    pub base_key: String,
    pub adapter: Option<PathBuf>,
    pub text: PathBuf,
    pub format: TextFormat,
    pub n_ctx: u32,
    pub stride: u32,
    pub chunks: u32,
    /// Candle measures without it, and for protocols that llama.cpp lacks.
    #[serde(default)]
    pub llama_cpp: Option<LlamaCppEvaluator>,
}

/// The format of a suite's text file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextFormat {
    /// Plain UTF-8 text, scored in chunks.
    Text,
    /// One JSON example a line, with prompt and completion.
    Documents,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct MeasureProgress {
    pub chunks: u32,
    pub total: u32,
    /// The current step, if it is not a chunk.
    #[serde(default)]
    pub note: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MeasureAnswer {
    Measured(Box<MeasureResult>),
    Failed { blame: MeasureFault, message: String },
}

/// The cause of a failed measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MeasureFault {
    /// The text, model or adapter: no attempt can succeed.
    Content,
    /// This host: others can do the work.
    Box,
    /// Unknown; another attempt may succeed.
    Work,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct MeasureResult {
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

/// Parses a value as each message in turn, for tests with hostile input.
#[doc(hidden)]
pub fn fuzz_messages(value: &serde_json::Value) {
    // The results do not matter; only a panic would.
    let _ = MeasureRequest::deserialize(value);
    let _ = MeasureProgress::deserialize(value);
    let _ = MeasureAnswer::deserialize(value);
}
