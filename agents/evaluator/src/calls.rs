//! What the agent asks of its measuring process, and what it answers.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use wire::v1;

/// Measure the perplexity of a text.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measure {
    pub base: PathBuf,
    pub adapter: Option<PathBuf>,
    pub text: PathBuf,
    pub format: Format,
    pub n_ctx: u32,
    pub stride: u32,
    pub chunks: u32,
}

/// How a text file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    Text,
    Documents,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Done {
    pub chunks: u32,
    pub total: u32,
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
    pub process: v1::eval::Process,
}

/// Reads a value as each message in turn, for tests with hostile input.
#[doc(hidden)]
pub fn fuzz(value: &serde_json::Value) {
    // Whether it is one is of no interest.
    let _ = Measure::deserialize(value);
    let _ = Done::deserialize(value);
    let _ = Measured::deserialize(value);
}
